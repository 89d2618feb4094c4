"""What the paced server says: the bytes of its answers, tick by tick, and the truth it writes down of each."""

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
STREAM_END = b"0\r\n\r\n"
DOCUMENT = {"id": "paced-0123456789abcdef", "created": 1700000000, "model": "paced"}


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What the server did for one streamed request.

    ``event_tokens[i]`` are the tokens of the i-th event that carries output, ``send_events[j]`` how many such
    events the j-th send held, and ``sends_ns[j]`` the moment right before its system call.
    """

    request_id: str
    """The header ``x-request-id``, or else ``prompt_digest``."""
    prompt_digest: str
    arrived_ns: int
    """The kernel's receive stamp of the request's last byte."""
    read_ns: int
    sends_ns: list[int]
    send_events: list[int]
    event_tokens: list[int]
    is_complete: bool


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for, from its body. Fields that only engines know are passed over."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.n not in (None, 1):
            raise ValueError("max_tokens has to be at least 1, and n has to be 1")

    @property
    def num_tokens(self) -> int:
        """The length of the answer: the limit is always reached."""
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return 16 if limit is None else limit

    @property
    def num_prompt_tokens(self) -> int:
        """Words of the text, or token ids where a list of them was sent: exact, though no model's count."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        return len((json.dumps(self.messages) if self.prompt is None else self.prompt).split())

    @property
    def has_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def prompt_digest(self) -> str:
        """Recognises a request whose client sends no identity."""
        content = json.dumps(self.messages if self.prompt is None else self.prompt, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def framed(content: bytes) -> bytes:
    """As one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(document: Mapping[str, Any]) -> bytes:
    return framed(b"data: " + msgspec.json.encode(document) + b"\n\n")


def words(first: int, last: int) -> str:
    return "".join(f" t{token}" for token in range(first, last))


def usage(asked: Asked) -> dict[str, int]:
    prompt, output = asked.num_prompt_tokens, asked.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def whole_answer(asked: Asked, *, is_chat: bool) -> bytes:
    """An answer that is not streamed."""
    text = words(0, asked.num_tokens)
    said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    kind = "chat.completion" if is_chat else "text_completion"
    choices = [{"index": 0, **said, "finish_reason": "length"}]
    return msgspec.json.encode({**DOCUMENT, "object": kind, "choices": choices, "usage": usage(asked)})


class Events:
    """The events of all streams. Those with tokens are made once and kept: a tick then only looks up its bytes."""

    def __init__(self, tokens_per_event: int) -> None:
        self.tokens_per_event = tokens_per_event
        self._made: dict[tuple[bool, int, int, bool], bytes] = {}

    def tokens(self, first: int, last: int, *, is_chat: bool, is_end: bool) -> bytes:
        """The event with the tokens from ``first`` to before ``last``."""
        key = (is_chat, first, last, is_end)
        if (found := self._made.get(key)) is None:
            text = words(first, last)
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            whole = {"index": 0, **choice, "logprobs": None, "finish_reason": "length" if is_end else None}
            found = self._made[key] = event({**DOCUMENT, "object": kind_of(is_chat=is_chat), "choices": [whole]})
        return found

    def end(self, asked: Asked, *, is_chat: bool) -> bytes:
        """What follows the event with the last token."""
        document = {**DOCUMENT, "object": kind_of(is_chat=is_chat), "choices": [], "usage": usage(asked)}
        return (event(document) if asked.has_usage else b"") + framed(DONE) + STREAM_END


def kind_of(*, is_chat: bool) -> str:
    return "chat.completion.chunk" if is_chat else "text_completion"


def numbers() -> "array[int]":
    return array("q")


@dataclass(slots=True, eq=False)
class Stream:
    """One answer under way."""

    asked: Asked
    request_id: str
    is_chat: bool
    arrived_ns: int
    read_ns: int
    num_tokens: int
    next_token: int = 0
    waiting: list[bytes] = field(default_factory=list)
    """Events that a later send takes along."""
    sends_ns: "array[int]" = field(default_factory=numbers)
    send_events: "array[int]" = field(default_factory=numbers)
    event_tokens: "array[int]" = field(default_factory=numbers)

    @property
    def is_over(self) -> bool:
        return self.next_token >= self.num_tokens

    def tick(self, events: Events, coalesce: int) -> bytes:
        """The bytes to send at this tick: none while events are held back for a later one."""
        first = self.next_token
        last = self.next_token = min(first + events.tokens_per_event, self.num_tokens)
        is_end = last == self.num_tokens
        self.waiting.append(events.tokens(first, last, is_chat=self.is_chat, is_end=is_end))
        self.event_tokens.append(last - first)
        if len(self.waiting) < coalesce and not is_end:
            return b""
        if not self.send_events:
            self.waiting.insert(0, HEAD)
        self.send_events.append(len(self.waiting) - (not self.send_events))
        if is_end:
            self.waiting.append(events.end(self.asked, is_chat=self.is_chat))
        content = self.waiting[0] if len(self.waiting) == 1 else b"".join(self.waiting)
        self.waiting.clear()
        return content

    def truth(self) -> Truth:
        return Truth(
            request_id=self.request_id,
            prompt_digest=self.asked.prompt_digest,
            arrived_ns=self.arrived_ns,
            read_ns=self.read_ns,
            sends_ns=self.sends_ns.tolist(),
            send_events=self.send_events.tolist(),
            event_tokens=self.event_tokens.tolist(),
            is_complete=self.is_over,
        )
