"""Tokens of a prompt, as ``llama-server`` counts them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchctl.engines.prompt_counter import PostJson
from benchctl.workload.tokenizers.tokenizer import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppCounter:
    """``POST /tokenize``, and before it ``/apply-template`` for chats.

    The server treats the text of a template as it treats a prompt: it adds its special tokens to both, but takes a
    BOS that the template wrote itself out of the text first.
    """

    chat_template_kwargs: Mapping[str, Any] | None = None

    async def count_text(self, post: PostJson, text: str) -> int | None:
        """One question; texts of special tokens count as these tokens, as they do in requests."""
        answer = await post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
        tokens = answer.get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def count_chat(self, post: PostJson, chat: Chat) -> int | None:
        """Two questions: the text of the chat, and its tokens."""
        body: dict[str, Any] = {"messages": chat}
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        text = (await post("/apply-template", body)).get("prompt")
        return await self.count_text(post, text) if isinstance(text, str) else None
