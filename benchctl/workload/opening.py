"""The opening of a load: its first requests, which are warm-up and hand their slots over to the measured ones.

A closed loop that begins with an empty server begins with a burst: all slots send at once, all prompts are computed
one after the other, and first tokens come many times later than they do from then on. With ``load.begin: running``
two requests for each slot go first. Those of the first wave end one after another, as requests do that are met in
progress: such a request is chosen in proportion to its length, and what is left of it is any part of it (the
inspection paradox, and the residual life of a renewal process: Feller, *An Introduction to Probability Theory and
Its Applications* II, chapter XI). Those of the second wave are whole; by the time they end, the burst is over.
"""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec

from benchctl.profile.model import Profile
from benchctl.records.record import PreparedRequest

_GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole parts, are spread evenly however many there are (Weyl)."""
_WORD_TOKENS: Final = 8
"""At most so many tokens has the word that comes before a prompt."""

Burst = tuple[PreparedRequest, ...]
"""Requests that are sent at once; the next burst begins when all have ended."""


def opening_of(requests: Sequence[PreparedRequest], profile: Profile) -> tuple[Burst, int]:
    """The requests that are sent before those of the load, and how many of both are warm-up, from the first on."""
    slots = profile.workload.arrival.max_concurrency
    if profile.load.begin == "running" and slots is not None and requests:
        opening = running_requests(requests, slots)
        return opening, len(opening)
    return (), num_discarded(len(requests), profile)


def num_discarded(num_requests: int, profile: Profile) -> int:
    """The number of requests that ``load.discard`` makes warm-up; one at least is measured."""
    return math.floor(profile.load.discard * num_requests)


def running_requests(requests: Sequence[PreparedRequest], slots: int) -> Burst:
    """Two requests for each of ``slots``, by the lengths of the load and with words of their own.

    The first is the rest of one in progress, the second whole.
    """
    by_length = sorted(requests, key=lambda request: (request.max_tokens, request.index))
    lengths = [*accumulate(request.max_tokens for request in by_length)]
    opening = []
    for i in range(slots):  # the launch at once of those that end early must not look like a pattern
        met = by_length[bisect_left(lengths, (i * _GOLDEN % 1) * lengths[-1])]
        left = math.ceil((i + 0.5) / slots * met.max_tokens)
        opening.append(again(met, f"opening-{i}", i, word(f"opening {i}"), left))
    for i in range(slots, 2 * slots):
        whole = requests[(i - slots) * len(requests) // slots]
        opening.append(
            again(whole, f"opening-{i}", i, word(f"opening {i}"), max(1, whole.max_tokens - _WORD_TOKENS))
        )
    return tuple(opening)


def word(name: str) -> str:
    """A word with which no prompt of a load begins, so that no prefix cache has what follows it."""
    return f"{hashlib.sha256(name.encode()).hexdigest()[:8]} "


def again(request: PreparedRequest, request_id: str, index: int, prefix: str, max_tokens: int) -> PreparedRequest:
    """A request once more, with other first words and at most ``max_tokens``, outside of any conversation."""
    messages, prompt = request.messages, request.prompt
    if messages is not None:
        messages = tuple(msgspec.structs.replace(message, content=prefix + message.content) for message in messages)
    return msgspec.structs.replace(
        request,
        request_id=request_id,
        index=index,
        arrival_ns=0,
        messages=messages,
        prompt=None if prompt is None else prefix + prompt,
        max_tokens=min(request.max_tokens, max_tokens),
        turn=None,
        think_ns=0,
        shared_tokens=0,
        shared_chars=0,
    )
