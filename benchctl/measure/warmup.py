"""The warm-up, after which the server has loaded, compiled and captured everything that the load needs.

Every engine first gets a few short requests, sampled as in the load. Real engines also have work that depends on
shapes (captured graphs, compiled kernels, growing buffers), which the warm-up covers: the longest and the shortest
prompt alone, then a burst as large as the load's largest batch, whose outputs end one after another so that the
batch passes through every size.

Planned prefixes are primed before each load.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Final

import msgspec

from benchctl.profile.engine_table import is_virtual
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.sections import SharedPrefix
from benchctl.records.record import Message, PreparedRequest
from benchctl.workload.opening import Burst, again, word

MAX_TOKENS: Final = 16
"""Enough steps to reach a token at which a value model has candidates to choose from."""
_ALL_SIZES: Final = 32
"""Up to this batch the warm-up covers every size; beyond it the multiples of 8, and of 16 above 256, because
engines capture those and pad the others to them."""
_LARGEST_BURST: Final = 512
"""The largest batch of the warm-up: more shapes would cost time and change little."""
_STEPS_PER_SIZE: Final = 2
_PRIMED: Final = 64
"""Prefixes that are primed at once: thousands of connections would be more than the load has."""


def warmup_bursts(
    requests: Sequence[PreparedRequest], profile: Profile, settings: VariantSettings
) -> tuple[Burst, ...]:
    first = warmup_requests(requests, profile.workload.num_warmups)
    bursts = [first] if first else []
    covers_shapes = profile.workload.warmup_shapes
    if covers_shapes is None:
        covers_shapes = not is_virtual(profile.engine.kind) and profile.workload.num_warmups > 0
    if requests and covers_shapes:
        size = largest_batch(requests, profile, settings)
        # Where the profile does not set it, the smallest default of servers
        tokens_per_step = getattr(settings.server, "max_num_batched_tokens", None) or 2048
        bursts += shape_bursts(requests, size, tokens_per_step)
    return tuple(bursts)


def warmup_requests(requests: Sequence[PreparedRequest], count: int) -> Burst:
    """The first ``count`` requests again (from the start, where there are fewer), short and with other words.

    With the same words the prompts of the load would be in the server's prefix cache. Their sampling is that of the
    load, so that the server loads now what it needs for it.
    """
    chosen = [requests[i % len(requests)] for i in range(count if requests else 0)]
    return tuple(
        msgspec.structs.replace(again(request, f"warmup-{i}", i, f"(warm-up {i}) ", MAX_TOKENS), ignore_eos=True)
        for i, request in enumerate(chosen)
    )


def prime_bursts(requests: Sequence[PreparedRequest], prefix: SharedPrefix | None) -> tuple[Burst, ...]:
    """Requests that bring the planned prefixes into an empty cache: the longest of each group, twice.

    The first time it is computed, the second time found, so that the load meets no work that is done once. Without
    them, all prompts of a group that are sent before the first of them is computed would miss it.
    """
    if prefix is None:
        return ()
    by_length = sorted(requests, key=lambda request: request.shared_tokens)
    longest = sorted({request.index % prefix.groups: request for request in by_length}.items())
    return tuple(
        tuple(
            _prefix_alone(request, f"prime-{turn}-{group}") for group, request in longest[start : start + _PRIMED]
        )
        for turn in range(2)
        for start in range(0, len(longest), _PRIMED)
    )


def _prefix_alone(request: PreparedRequest, name: str) -> PreparedRequest:
    """The prefix of a request with a word of its own behind it, for one token."""
    text = (request.prompt or "") if request.messages is None else request.messages[0].content
    text = f"{text[: request.shared_chars]} {word(name)}".rstrip()
    form = {"prompt": text} if request.messages is None else {"messages": (Message(role="user", content=text),)}
    return msgspec.structs.replace(request, request_id=name, arrival_ns=0, max_tokens=1, ignore_eos=True, **form)


def largest_batch(requests: Sequence[PreparedRequest], profile: Profile, settings: VariantSettings) -> int:
    """Sequences in the largest batch of the load: those that can be open at once, up to the server's limit."""
    num_open = min(profile.workload.arrival.max_concurrency or len(requests), len(requests))
    choices = sorted((request.n for request in requests), reverse=True)
    return min(
        sum(choices[:num_open]), getattr(settings.server, "max_num_seqs", None) or _LARGEST_BURST, _LARGEST_BURST
    )


def shape_bursts(requests: Sequence[PreparedRequest], size: int, tokens_per_step: int) -> Iterator[Burst]:
    """The longest prompt alone, the shortest alone, all choices of one request, then the burst that drains.

    The burst has ``size`` sequences: prompts from the longest to the shortest, the longest with the shortest
    output, so that none is longer than in the load. It stays whole until the last prompt is computed, as far as the
    lengths of the load allow it.
    """
    by_length = sorted(requests, key=lambda request: (-request.prompt_tokens, request.index))
    numbers = iter(range(2 * size + 4))
    for request in (by_length[0], by_length[-1]):
        yield (_shape(request, next(numbers), 2, n=1),)
    widest = max(requests, key=lambda request: request.n)
    if widest.n > 1:
        yield (_shape(widest, next(numbers), MAX_TOKENS, n=widest.n),)
    chosen = spread(by_length, size)
    limit = min(request.max_tokens for request in chosen)
    num_prefill_steps = sum(request.prompt_tokens for request in chosen) // max(tokens_per_step, 1) + 1
    yield tuple(
        _shape(request, next(numbers), length, n=1)
        for request, length in zip(
            chosen, drain_lengths(size, whole_steps=MAX_TOKENS + num_prefill_steps, limit=limit), strict=True
        )
    )


def drain_lengths(size: int, *, whole_steps: int, limit: int) -> tuple[int, ...]:
    """Output lengths of ``size`` sequences, ascending and at most ``limit``, whose batch drains through all sizes.

    The batch is whole for ``whole_steps`` tokens and then stays two tokens at each smaller size of ``batch_sizes``.
    Where ``limit`` is too low for that, the sizes have one token each, then the whole batch gets fewer, then some
    sizes share a token.
    """
    sizes = batch_sizes(size)[::-1]
    num_drops = len(sizes) - 1
    step = _STEPS_PER_SIZE if whole_steps + _STEPS_PER_SIZE * num_drops <= limit else 1
    whole = max(1, min(whole_steps, limit - step * num_drops))
    scale = min(1.0, (limit - whole) / (step * num_drops)) if num_drops else 0.0
    # The sequences that make the difference between two sizes end together, when the batch is to become smaller.
    ends = [
        (large - small, whole + int(i * step * scale)) for i, (large, small) in enumerate(pairwise((*sizes, 0)))
    ]
    return tuple(chain.from_iterable([length] * count for count, length in ends))


def batch_sizes(largest: int) -> tuple[int, ...]:
    """The sizes from 1 to ``largest`` at which a server may have a shape of its own, ascending."""
    beyond = [*range(_ALL_SIZES + 8, min(largest, 256) + 1, 8), *range(272, largest + 1, 16)]
    return tuple(sorted({*range(1, min(largest, _ALL_SIZES) + 1), *beyond, largest}))


def spread(by_length: Sequence[PreparedRequest], size: int) -> list[PreparedRequest]:
    """``size`` requests over the whole range, from the longest to the shortest; several times each if need be."""
    if size <= 1:
        return [by_length[0]][:size]
    return [by_length[i * (len(by_length) - 1) // (size - 1)] for i in range(size)]


def _shape(request: PreparedRequest, number: int, max_tokens: int, *, n: int) -> PreparedRequest:
    """A request of a shape burst: its prompt begins with a word that no other prompt begins with."""
    shape = again(request, f"warmup-shape-{number}", number, word(f"warm-up {number}"), max_tokens)
    return msgspec.structs.replace(shape, n=n, ignore_eos=True)
