"""Records of simulated requests, as a client without network, queue or delay of its own would write them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from benchctl.errors import UsageError
from benchctl.records.record import ChoiceRecord, PreparedRequest, RequestError, RequestRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.service import ServedChoice, ServedRequest

_OK: Final = 200
_BAD_REQUEST: Final = 400


def record_of(
    served: ServedRequest, prepared: PreparedRequest, config: SimConfig, *, is_warmup: bool, is_open_loop: bool
) -> RequestRecord:
    """The record of a request that was served; only an open loop plans a send for a time without a slot."""
    choices = tuple(_choice_record(choice, config) for choice in served.choices)
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
        cached_tokens=first.num_cached if config.has_cache else None,
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


def _choice_record(choice: ServedChoice, config: SimConfig) -> ChoiceRecord:
    """A chunk for every ``tokens_per_chunk`` tokens, with all that one step has given.

    The rest comes with the event that ends the choice.
    """
    answer, token_ns = choice.sequence.answer, choice.token_ns
    texts = [answer.token_text(position) for position in range(len(token_ns))]
    sizes, chars, chunk_ns = [1] * len(texts), [len(text) for text in texts], token_ns
    if config.tokens_per_chunk > 1 or config.num_speculative_tokens:
        ends = chunk_ends(token_ns, config.tokens_per_chunk)
        chunks = [texts[start:end] for start, end in pairwise((0, *ends))]
        sizes, chars = [len(chunk) for chunk in chunks], [sum(map(len, chunk)) for chunk in chunks]
        chunk_ns = [token_ns[end - 1] for end in ends]
        if sizes[-1] < config.tokens_per_chunk:
            chunk_ns[-1] = choice.end_ns
    return ChoiceRecord(
        index=choice.sequence.choice,
        chunk_ns=tuple(chunk_ns),
        chunk_tokens=tuple(sizes),
        chunk_chars=tuple(chars),
        output_tokens=len(token_ns),
        finish_reason=answer.finish_reason,
        text="".join(texts),
    )


def chunk_ends(token_ns: Sequence[int], tokens_per_chunk: int) -> list[int]:
    """Tokens of an answer until the end of each chunk: a step sends all if that many wait, or if it is the last.

    Tokens of one step have one time.
    """
    ends = [end for end, (time_ns, next_ns) in enumerate(pairwise((*token_ns, -1)), start=1) if next_ns != time_ns]
    sent, chunks = 0, []
    for end in ends:
        if end - sent >= tokens_per_chunk or end == len(token_ns):
            chunks.append(end)
            sent = end
    return chunks
