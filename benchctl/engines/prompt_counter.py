"""Questions that ask a server for the number of tokens in a prompt, as each kind of server understands them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from benchctl.untrusted import PROMPT_TOKENS
from benchctl.workload.tokenizers.tokenizer import Chat

PostJson: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Posts an object to a path of a server and gets the object that it answers; empty where it refuses."""


class PromptCounter(Protocol):
    """One kind of server's way to count the tokens of a prompt without computing it."""

    async def count_text(self, post: PostJson, text: str) -> int | None:
        """Tokens of ``text`` as the prompt of a completion; None where the server does not say."""

    async def count_chat(self, post: PostJson, chat: Chat) -> int | None:
        """Tokens of ``chat``, with those of the model's template; None where the server does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCounter:
    """``POST /tokenize`` as vLLM defines it, which SGLang and the simulator take over.

    SGLang counts chats since 2026, and refuses them before. As no model is named, a server of several counts with
    its first.
    """

    chat_template_kwargs: Mapping[str, Any] | None = None

    async def count_text(self, post: PostJson, text: str) -> int | None:
        """One question. A server adds its special tokens to the prompt of a completion."""
        return await self._count(post, {"prompt": text, "add_special_tokens": True})

    async def count_chat(self, post: PostJson, chat: Chat) -> int | None:
        """One question. A template writes its special tokens itself."""
        body: dict[str, Any] = {"messages": chat, "add_generation_prompt": True, "add_special_tokens": False}
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        return await self._count(post, body)

    async def _count(self, post: PostJson, body: Mapping[str, Any]) -> int | None:
        count = (await post("/tokenize", body)).get("count")
        return count if type(count) is int and 0 <= count <= PROMPT_TOKENS else None
