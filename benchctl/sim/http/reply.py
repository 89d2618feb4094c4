"""Replies to clients: one buffer of server-sent events for each request, or one JSON document."""

import asyncio
from typing import Any, Final

import msgspec

from benchctl.sim.http.openai_api import ChatBody, CompletionBody, StreamOptions
from benchctl.sim.requests.request import Request
from benchctl.sim.scheduling.sequence import Sequence, SequenceStatus

_encode = msgspec.json.encode
_NO_OPTIONS: Final = StreamOptions()


class Reply:
    """Gathers the output of one request for the handler that serves it.

    All events of one step leave in one piece. Each choice has one event for every ``tokens_per_chunk`` tokens;
    the rest comes with the event that ends it.
    """

    def __init__(
        self, body: CompletionBody | ChatBody, request: Request, *, model: str, created: int, tokens_per_chunk: int
    ) -> None:
        self.request: Final = request
        self.is_streaming: Final = bool(body.stream)
        self._is_chat: Final = isinstance(body, ChatBody)
        self._options: Final = body.stream_options or _NO_OPTIONS
        self._with_ids: Final = bool(body.return_token_ids)
        self._tokens_per_chunk: Final = tokens_per_chunk
        self._sent: Final = [0] * request.n
        self._finished: Final[dict[int, Sequence]] = {}
        self._num_output = 0
        self._cached_tokens: int | None = None
        self._buffer: list[bytes] = []
        self._changed: Final = asyncio.Event()
        self._identity: Final = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request.request_id}",
            "object": ("chat.completion" if self._is_chat else "text_completion"),
            "created": created,
            "model": model,
        }
        chunk = self._identity | ({"object": "chat.completion.chunk"} if self._is_chat else {})
        self._head: Final = b"data: " + _encode(chunk)[:-1] + b',"choices":'
        self._text_key: Final = b',"delta":{"content":' if self._is_chat else b',"text":'
        self._after_text: Final = b'},"logprobs":null' if self._is_chat else b',"logprobs":null'

    @property
    def is_done(self) -> bool:
        return len(self._finished) == self.request.n

    def has_ended(self, seq: Sequence) -> bool:
        return seq.choice in self._finished

    def add(self, seq: Sequence, *, reports_cached: bool) -> None:
        """Take in a sequence that has one more token, or has ended, or both."""
        has_ended = seq.status is SequenceStatus.FINISHED
        sent = self._sent[seq.choice]
        if reports_cached and self._cached_tokens is None:
            self._cached_tokens = seq.num_cached
        if has_ended:
            self._finished[seq.choice] = seq
        if self.is_streaming and (has_ended or seq.num_output - sent >= self._tokens_per_chunk):
            self._add_event(seq, sent, has_ended=has_ended)
            self._sent[seq.choice] = seq.num_output
        if self.is_done:
            self._end()

    def flush(self) -> None:
        """Wake the handler if it has something to send."""
        if self._buffer or self.is_done:
            self._changed.set()

    async def take(self) -> bytes:
        """Wait for events and return all that have gathered."""
        await self._changed.wait()
        self._changed.clear()
        data = b"".join(self._buffer)
        self._buffer.clear()
        return data

    async def document(self) -> dict[str, Any]:
        """Wait for the end and return the whole answer."""
        while not self.is_done:
            await self._changed.wait()
            self._changed.clear()
        choices = [self._choice(self._finished[index]) for index in sorted(self._finished)]
        return {**self._identity, "choices": choices, "usage": self._usage()}

    def _choice(self, seq: Sequence) -> dict[str, Any]:
        text = seq.answer.text()
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        ids = {"token_ids": [seq.answer.token_id(i) for i in range(seq.num_output)]} if self._with_ids else {}
        return {"index": seq.choice, **content, "logprobs": None, "finish_reason": seq.answer.finish_reason, **ids}

    def _add_event(self, seq: Sequence, sent: int, *, has_ended: bool) -> None:
        answer, choice = seq.answer, b"%d" % seq.choice
        if sent == 0 and self._is_chat:
            role = b'[{"index":%s,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            self._buffer += (self._head, role % choice, self._usage_part(0), b"}\n\n")
        end = seq.num_output
        text = answer.token_text(sent) if end - sent == 1 else "".join(map(answer.token_text, range(sent, end)))
        ids = b""
        if self._with_ids:
            ids = b',"token_ids":' + _encode([answer.token_id(position) for position in range(sent, end)])
        reason = b'"%s"' % answer.finish_reason.encode() if has_ended else b"null"
        self._buffer += (
            self._head,
            b'[{"index":',
            choice,
            self._text_key,
            _encode(text),
            self._after_text,
            b',"finish_reason":',
            reason,
            ids,
            b"}]",
            self._usage_part(end - sent),
            b"}\n\n",
        )

    def _usage_part(self, new_tokens: int) -> bytes:
        self._num_output += new_tokens
        if not self._options.continuous_usage_stats:
            return b""
        return b',"usage":' + _encode(self._usage(self._num_output))

    def _usage(self, completion_tokens: int | None = None) -> dict[str, Any]:
        prompt_tokens = self.request.prompt.num_tokens
        if completion_tokens is None:
            completion_tokens = sum(seq.num_output for seq in self._finished.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        if self._cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        return usage

    def _end(self) -> None:
        if not self.is_streaming:
            return
        if self._options.include_usage:
            self._buffer += (self._head, b'[],"usage":', _encode(self._usage()), b"}\n\n")
        self._buffer.append(b"data: [DONE]\n\n")
