"""Prompts as they are sent: planned ones written, all counted by one tokenizer, in few calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchctl.records.record import Message
from benchctl.workload.alphabet import Count
from benchctl.workload.datasets.prompt import Prompt
from benchctl.workload.tokenizers.tokenizer import Tokenizer
from benchctl.workload.written_texts import WrittenText, write_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPrompt:
    """Messages or text of a prompt, exactly one of them, and the number of its tokens."""

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    num_tokens: int


def counted_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, chat: bool) -> tuple[CountedPrompt, ...]:
    """Each prompt as it is sent; ``chat`` sends plain text as one message of the user.

    Raises ProfileError for a planned length that leaves no text beside what the server adds.
    """
    count = _count_as_chats(tokenizer) if chat else tokenizer.count_texts
    written = write_texts((prompt.token_numbers for prompt in prompts if prompt.token_numbers is not None), count)
    texts = [prompt.text for prompt in prompts if prompt.text is not None and (chat or prompt.text_tokens is None)]
    lengths = dict(zip(texts, count(texts), strict=True)) if texts else {}
    chats = [prompt.messages for prompt in prompts if prompt.messages is not None]
    chat_lengths = iter(tokenizer.count_chats(chats) if chats else ())
    return tuple(
        CountedPrompt(messages=prompt.messages, num_tokens=next(chat_lengths))
        if prompt.messages is not None
        else _sent(_text(prompt, written, lengths), chat=chat)
        for prompt in prompts
    )


def _count_as_chats(tokenizer: Tokenizer) -> Count:
    return lambda texts: tokenizer.count_chats([_user_chat(text) for text in texts])


def _user_chat(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


def _text(prompt: Prompt, written: dict[tuple[int, ...], WrittenText], lengths: dict[str, int]) -> WrittenText:
    if prompt.token_numbers is not None:
        return written[prompt.token_numbers]
    text = prompt.text or ""
    return WrittenText(text, lengths.get(text, prompt.text_tokens or 0))


def _sent(written: WrittenText, *, chat: bool) -> CountedPrompt:
    if chat:
        return CountedPrompt(messages=_user_chat(written.text), num_tokens=written.num_tokens)
    return CountedPrompt(text=written.text, num_tokens=written.num_tokens)
