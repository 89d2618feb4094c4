"""Records of simulated requests, as a client without network, queue or delay of its own would write them."""

from typing import Final

from benchctl.errors import UsageError
from benchctl.records.request import ChoiceRecord, PreparedRequest, RequestError, RequestRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.service import ServedChoice, ServedRequest

_OK: Final = 200
_BAD_REQUEST: Final = 400


def record_of(
    served: ServedRequest, prepared: PreparedRequest, config: SimConfig, *, is_warmup: bool, is_open_loop: bool
) -> RequestRecord:
    """The record of a request that was served; only an open loop plans a send for a time without a slot."""
    choices = tuple(_choice_record(choice, config.tokens_per_chunk) for choice in served.choices)
    first = served.choices[0].sequence
    return RequestRecord(
        request_id=prepared.request_id,
        index=prepared.index,
        is_warmup=is_warmup,
        scheduled_ns=served.planned_ns if is_open_loop else served.sent_ns,
        slot_free_ns=served.slot_free_ns,
        sent_ns=served.sent_ns,
        done_ns=served.end_ns,
        status=_OK,
        choices=choices,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(len(choice.token_ns) for choice in served.choices),
        cached_tokens=first.num_cached if config.enable_prefix_caching else None,
        natural_tokens=prepared.natural_tokens,
    )


def refusal_record(
    prepared: PreparedRequest, reason: UsageError, planned_ns: int, *, is_warmup: bool
) -> RequestRecord:
    """The record of a request that the server refuses as it comes in."""
    return RequestRecord(
        request_id=prepared.request_id,
        index=prepared.index,
        is_warmup=is_warmup,
        scheduled_ns=planned_ns,
        sent_ns=planned_ns,
        done_ns=planned_ns,
        status=_BAD_REQUEST,
        natural_tokens=prepared.natural_tokens,
        error=RequestError(kind="http-status", message=str(reason), status=_BAD_REQUEST),
    )


def _choice_record(choice: ServedChoice, tokens_per_chunk: int) -> ChoiceRecord:
    """A chunk for every ``tokens_per_chunk`` tokens; the rest comes with the event that ends the choice."""
    answer, token_ns = choice.sequence.answer, choice.token_ns
    texts = [answer.token_text(position) for position in range(len(token_ns))]
    sizes, chars, chunk_ns = [1] * len(texts), [len(text) for text in texts], token_ns
    if tokens_per_chunk > 1:
        chunks = [texts[start : start + tokens_per_chunk] for start in range(0, len(texts), tokens_per_chunk)]
        sizes, chars = [len(chunk) for chunk in chunks], [sum(map(len, chunk)) for chunk in chunks]
        chunk_ns = token_ns[tokens_per_chunk - 1 :: tokens_per_chunk]
        if len(chunk_ns) < len(chunks):
            chunk_ns.append(choice.end_ns)
    return ChoiceRecord(
        index=choice.sequence.choice,
        chunk_ns=tuple(chunk_ns),
        chunk_tokens=tuple(sizes),
        chunk_chars=tuple(chars),
        output_tokens=len(token_ns),
        finish_reason=answer.finish_reason,
        text="".join(texts),
    )
