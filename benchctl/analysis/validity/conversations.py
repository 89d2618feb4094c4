"""Conversations: the check of the order of their turns, and what a prefix cache can have of them."""

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter

from benchctl.analysis.validity.answers import NUM_NAMED, Check, block_tokens
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


def hits_of_turns(requests: Sequence[RequestRecord], record: RunRecord) -> tuple[float, float]:
    """The least and the most of the prompt tokens that a cache has of conversations, by the server's own counts.

    The least are whole blocks of the prompt before each turn, or none where the server does not say how large its
    blocks are. The most has the answer, too: a tokenizer may make other tokens of it, and a chat template may
    rewrite it.
    """
    block, before = block_tokens(record), [each for each, _ in _later_turns(requests)]
    prompts = [each.prompt_tokens or 0 for each in before]
    whole = [num_tokens + (each.completion_tokens or 0) for num_tokens, each in zip(prompts, before, strict=True)]
    least = sum(num_tokens // block * block for num_tokens in prompts) if block else 0
    most = sum(num_tokens // (block or 1) * (block or 1) for num_tokens in whole)
    num_tokens = sum(each.prompt_tokens or 0 for each in requests) or 1
    return least / num_tokens, most / num_tokens
