"""Checks of conversations: their turns in order, and what the prefix cache had of them."""

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter

from benchctl.analysis.validity.answers import HITS_TOLERANCE, NUM_NAMED, Check, block_tokens
from benchctl.records.record import PreparedRequest, RequestRecord, RunRecord
from benchctl.units import first_of


def _later_turns(requests: Sequence[RequestRecord]) -> list[tuple[RequestRecord, RequestRecord]]:
    """Each later turn that was sent, behind the turn before it."""
    pairs = pairwise(sorted(requests, key=attrgetter("index")))
    return [(before, turn) for before, turn in pairs if turn.turn and turn.sent_ns is not None]


def check_turns(
    requests: Sequence[RequestRecord], prepared: Sequence[PreparedRequest], record: RunRecord
) -> tuple[Check, ...]:
    """No turn was sent before the answer before it was complete and its user had thought; none without turns."""
    if not any(request.turn for request in prepared):
        return ()
    turns = _later_turns(requests)
    early = [
        turn.request_id
        for before, turn in turns
        if (turn.sent_ns or 0)
        < (before.done_ns or 0) + round(prepared[turn.index].think_ns / (record.time_scale or 1.0))
    ]
    detail = f"{len(turns)} later turns, {len(early)} of them before the answer before it and its think time"
    detail += f": {first_of(early, NUM_NAMED)}" if early else ""
    return (Check("turns", not early, detail, is_fatal=True),)


def check_hits_of_turns(requests: Sequence[RequestRecord], hits: float | None, record: RunRecord) -> Check:
    """The share of prompt tokens from a cache is one that conversations can have.

    At least whole blocks of the prompt before each turn, at most of its answer as well, by the server's own counts.
    A warning alone: a tokenizer may make other tokens of an answer, and a chat template may rewrite it.
    """
    stated, prompt = block_tokens(record), sum(request.prompt_tokens or 0 for request in requests)
    block = stated or 1
    counts = [(before.prompt_tokens or 0, before.completion_tokens or 0) for before, _ in _later_turns(requests)]
    least, most = (
        sum(num_tokens // block * block for num_tokens in each)
        for each in ([prompt_tokens for prompt_tokens, _ in counts], [sum(both) for both in counts])
    )
    if hits is None or not prompt:
        return Check("prefix-cache", None, "neither counters nor usage record hits in a prefix cache")
    detail = f"conversations can have {least / prompt:.2f} to {most / prompt:.2f}, measured {hits:.2f}"
    is_possible = least / prompt - HITS_TOLERANCE <= hits <= most / prompt + HITS_TOLERANCE
    if not is_possible and hits < least / prompt and stated is None:
        return Check("prefix-cache", None, f"{detail}; the server does not say how large its blocks are")
    remedy = "" if is_possible else "; the cache is too small for open conversations, or the server shares it"
    return Check("prefix-cache", is_possible, detail + remedy)
