"""The request bodies of the OpenAI dialect, as vLLM and the guided fork extend it, parsed into core requests."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from benchctl.errors import UsageError
from benchctl.guided.parameter_table import EXPONENTIAL_MODES
from benchctl.guided.params import TOKEN_TEMPERATURE_KEYS, GuidanceParams, parse_params
from benchctl.records.record import Message
from benchctl.sim.config import SimConfig
from benchctl.sim.requests.request import Prompt, Request, SamplingParams
from benchctl.sim.requests.static_prefixes import static_prefixes
from benchctl.workload.datasets.tokens import tokenize, tokenize_chat

_COMPLETION_MAX_TOKENS: Final = 16
"""Default of max_tokens at OpenAI's completions endpoint."""
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
    stop: str | list[str] | None = None
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


class ScheduleBody(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of a phase of load."""

    requests: Annotated[list[ArrivalBody], Meta(min_length=1)]
    max_concurrency: Count | None = None
    is_warmup: bool = False


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
        stop=_stop(body),
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
    return tokenize_chat(Message(role=message.role, content=_content(message)) for message in messages)


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


def _content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)


def _max_tokens(body: CompletionBody | ChatBody, prompt: Prompt, config: SimConfig) -> int:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens or max(1, config.max_model_len - prompt.num_tokens)
    return body.max_tokens or _COMPLETION_MAX_TOKENS


def _stop(body: Body) -> tuple[str, ...]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stop):
        raise UsageError("stop: an empty string stops nothing; leave it out")
    return tuple(stop)


def _guidance(body: Body, sampling: SamplingParams, config: SimConfig) -> GuidanceParams | None:
    if not body.custom_params:
        return None
    if config.value_model is None:
        raise UsageError(
            "custom_params: this server has no value model; start it with --value-model or leave them out"
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
            "server with --revision V1 or V2"
        )
    return guidance
