"""Bodies of the OpenAI dialect, as vLLM and the guided fork extend it, and the replies to them."""

import asyncio
from collections.abc import Mapping, Sequence as Items
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from benchctl.errors import UsageError
from benchctl.guided.params import EXPONENTIAL_MODES, TOKEN_TEMPERATURE_KEYS, GuidanceParams, parse_params
from benchctl.records.record import Message
from benchctl.sim.config import SimConfig
from benchctl.sim.requests import Prompt, Request, SamplingParams, static_prefixes
from benchctl.sim.sequences import Sequence, SequenceStatus
from benchctl.workload.tokenizers import tokenize, tokenize_chat

Count = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints take. Unknown fields are ignored, as vLLM does."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = 1
    seed: int | None = None
    max_tokens: Count | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=-1)] | None = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = 0.0
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    custom_params: dict[str, Any] | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[str | int]


class TextPart(msgspec.Struct, frozen=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart]


class ChatBody(Body, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to be counted, in vLLM's form."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None


class ArrivalBody(msgspec.Struct, frozen=True):
    request_id: str
    arrival_ns: Annotated[int, Meta(ge=0)]
    think_ns: Annotated[int, Meta(ge=0)] | None = None
    """Of a later turn of a conversation: it is due so long after the end of the request before it."""


class ScheduleBody(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of a phase of load."""

    requests: Annotated[list[ArrivalBody], Meta(min_length=1)]
    max_concurrency: Count | None = None
    is_warmup: bool = False
    num_warmups: Annotated[int, Meta(ge=0)] = 0
    """Requests at the beginning that are warm-up."""


def request_from(body: CompletionBody | ChatBody, request_id: str, config: SimConfig) -> Request:
    """The core request that a body describes. Raises UsageError, which becomes a 400."""
    pieces = _pieces(body)
    prompt = Prompt.of(pieces, config.block_size, salt=body.cache_salt)
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or -1,
        min_p=body.min_p or 0.0,
    )
    return Request(
        request_id=request_id,
        prompt=prompt,
        max_tokens=_max_tokens(body, prompt, config),
        n=body.n or 1,
        seed=body.seed or 0,
        ignore_eos=bool(body.ignore_eos),
        sampling=sampling,
        guidance=_guidance(body, sampling, config),
        static_tokens=_static_tokens(pieces, config),
    )


def count_prompt(body: TokenizeBody) -> int:
    """The tokens that ``usage`` will state for a prompt. Raises UsageError, which becomes a 400."""
    if (body.prompt is None) is (body.messages is None):
        raise UsageError("send prompt or messages, one of the two")
    return len(_chat_pieces(body.messages) if body.messages is not None else tokenize(body.prompt or ""))


def _chat_pieces(messages: Items[ChatMessage]) -> list[str]:
    return tokenize_chat(
        Message(
            role=message.role,
            content=message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content),
        )
        for message in messages
    )


def _pieces(body: CompletionBody | ChatBody) -> Items[str]:
    if isinstance(body, ChatBody):
        pieces = _chat_pieces(body.messages)
    elif isinstance(body.prompt, str):
        pieces = tokenize(body.prompt)
    elif all(isinstance(item, int) for item in body.prompt):
        pieces = [f"<{token_id}>" for token_id in body.prompt]
    elif len(body.prompt) == 1:
        pieces = tokenize(str(body.prompt[0]))
    else:
        raise UsageError(f"prompt: {len(body.prompt)} prompts in one request; send one request for each")
    if not pieces:
        raise UsageError("prompt is empty; send at least one token")
    return pieces


def _static_tokens(pieces: Items[str], config: SimConfig) -> int:
    if config.cached_prompts is None:
        return 0
    num_tokens = static_prefixes(config.cached_prompts, config.cached_prompt_tokens).match(pieces)
    # Only llm-mock computes nothing for a prompt that its cache has: the last token's logits are needed.
    return num_tokens if config.cost_model == "llm-mock" else min(num_tokens, len(pieces) - 1)


def _max_tokens(body: CompletionBody | ChatBody, prompt: Prompt, config: SimConfig) -> int:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens or max(1, config.max_model_len - prompt.num_tokens)
    # Default of max_tokens at OpenAI's completions endpoint
    return body.max_tokens or 16


def _guidance(body: Body, sampling: SamplingParams, config: SimConfig) -> GuidanceParams | None:
    if not body.custom_params:
        return None
    if config.value_model is None:
        raise UsageError(
            "custom_params: this server has no value model; start it with value_model or leave them out"
        )
    return parse_custom_params(body.custom_params, top_k=sampling.top_k, revision=config.revision)


def parse_custom_params(params: Mapping[str, Any], *, top_k: int, revision: str) -> GuidanceParams | None:
    """Check ``custom_params`` and return the guidance that they ask for; None when no key activates any.

    Modes ``centered_exp`` and ``value_bias`` need a finite top_k, and so does V4 for all guidance; V4 refuses
    hard constraints. Keys that scale single tokens are accepted and have no effect. Raises UsageError naming key,
    value and remedy.
    """
    if ("boosted_token_ids" in params) != ("token_temp_divisor" in params):
        raise UsageError("custom_params: boosted_token_ids and token_temp_divisor must come together")
    own = {key: value for key, value in params.items() if key not in TOKEN_TEMPERATURE_KEYS}
    guidance = parse_params(own, source="custom_params")
    if guidance is None:
        return None
    if top_k == -1 and (guidance.mode in EXPONENTIAL_MODES or revision == "V4"):
        raise UsageError(
            f"custom_params: mode {guidance.mode!r} with top_k -1; set a finite top_k of at least 2, because the "
            "value model cannot score the whole vocabulary"
        )
    if guidance.has_target and revision == "V4":
        raise UsageError(
            "custom_params: revision V4 has no hard constraints; drop target_value and target_length or start the "
            "server with revision V1 or V2"
        )
    return guidance


_encode = msgspec.json.encode
_NO_OPTIONS: Final = StreamOptions()


class Reply:
    """Gathers the output of one request for the handler that serves it.

    All events of one step leave in one piece. Each choice has one event for every ``tokens_per_chunk`` tokens;
    the rest comes with the event that ends it.
    """

    def __init__(self, body: CompletionBody | ChatBody, request: Request, config: SimConfig, created: int) -> None:
        self.request: Final = request
        self.is_streaming: Final = bool(body.stream)
        self._is_chat: Final = isinstance(body, ChatBody)
        self._options: Final = body.stream_options or _NO_OPTIONS
        self._with_ids: Final = bool(body.return_token_ids)
        self._config: Final = config
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
            "model": config.model,
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

    def add(self, seq: Sequence) -> None:
        """Take in a sequence that has one more token, or has ended, or both."""
        has_ended = seq.status is SequenceStatus.FINISHED
        sent = self._sent[seq.choice]
        if self._config.has_cache and self._cached_tokens is None:
            self._cached_tokens = seq.num_cached
        if has_ended:
            self._finished[seq.choice] = seq
        if self.is_streaming and (has_ended or seq.num_output - sent >= self._config.tokens_per_chunk):
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
            await self.take()
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
