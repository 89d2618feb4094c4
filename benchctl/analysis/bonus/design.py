"""The forward passes that tell the two ways of backfill apart."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

from benchctl.errors import UsageError
from benchctl.profile.sections.forward_pass import MODES, ForwardPass, ForwardPoint, Mode

Backfill: TypeAlias = Literal["expansion", "prefill"]


class DesignRow(NamedTuple):
    """One comparison of both ways."""

    context_tokens: int
    decode_mode: Mode
    prefill_mode: Mode
    batch_size: int
    bonus_tokens: int
    """Sequences of the batch that lack a bonus token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BonusDesign:
    """Batch sizes at which both ways are compared, and the modes in which their passes run."""

    counts: Mapping[int, tuple[int, ...]]
    """Numbers of sequences that lack a bonus token at which each batch size is compared, in ascending order."""
    context_tokens: int
    modes: tuple[Mode, ...] = ("eager",)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.counts))

    @property
    def points(self) -> tuple[ForwardPoint, ...]:
        """Every pass of the comparison once: decodes, then prefills, each in ascending order of sequences."""
        decodes: set[int] = set(self.batch_sizes)
        prefills: set[int] = set()
        for batch_size, counts in self.counts.items():
            decodes.update(batch_size + count for count in counts)
            prefills.update(counts)
        return (
            *(decode_point(size, self.context_tokens) for size in sorted(decodes)),
            *(backfill_point(count, self.context_tokens) for count in sorted(prefills)),
        )

    @property
    def mode_pairs(self) -> tuple[tuple[Mode, Mode], ...]:
        """The modes of the decode and of the prefill pass, every combination.

        Decode with graphs against prefill without is the choice that vLLM had: graphs were captured for decode
        only.
        """
        return tuple(product(self.modes, self.modes))

    @property
    def rows(self) -> tuple[DesignRow, ...]:
        """Every comparison, by modes, batch size and number of tokens."""
        return tuple(
            DesignRow(self.context_tokens, *modes, batch_size, count)
            for modes in self.mode_pairs
            for batch_size in self.batch_sizes
            for count in self.counts[batch_size]
        )


def decode_point(batch_size: int, context_tokens: int) -> ForwardPoint:
    """One decode step of a batch."""
    return ForwardPoint(phase="decode", batch_size=batch_size, context_tokens=context_tokens)


def backfill_point(num_tokens: int, context_tokens: int) -> ForwardPoint:
    """The prefill pass of ``num_tokens`` bonus tokens, each of a sequence of its own."""
    return ForwardPoint(phase="prefill", batch_size=num_tokens, new_tokens=1, context_tokens=context_tokens)


def bonus_design(
    batch_sizes: Sequence[int], context_tokens: int, modes: Sequence[Mode], *, every_count: bool = False
) -> BonusDesign:
    """The design with 1, the powers of two below the batch size, and the batch size itself as numbers of tokens.

    The last is the case in which every sequence lacks a token. With ``every_count`` these are all numbers from 1
    on. Raises UsageError for sizes that no batch has.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise UsageError(f"batch sizes {list(batch_sizes)}: give at least one, each 1 or more")
    if context_tokens < 1:
        raise UsageError(f"context of {context_tokens} tokens: a sequence in decode has 1 or more")
    return BonusDesign(
        counts={
            size: tuple(range(1, size + 1)) if every_count else _powers_and_itself(size)
            for size in sorted(set(batch_sizes))
        },
        context_tokens=context_tokens,
        modes=tuple(modes),
    )


def measured_designs(passes: Iterable[ForwardPass]) -> tuple[BonusDesign, ...]:
    """The largest design that these passes hold at each context, in ascending order of contexts.

    A batch size counts if decodes at B and 2B and a prefill of B tokens are there in every mode of that context.
    Passes behind an empty cache are none of a design: nothing comes before a bonus token there.
    """
    modes_of: dict[ForwardPoint, set[Mode]] = {}
    for point, mode in passes:
        if point.context_tokens:
            modes_of.setdefault(point, set()).add(mode)
    designs = []
    for context in sorted({point.context_tokens for point in modes_of}):
        modes = {
            mode for point, of_point in modes_of.items() if point.context_tokens == context for mode in of_point
        }
        points = {point for point, of_point in modes_of.items() if of_point == modes}
        counts = {
            size: _counts_within(points, size, context)
            for size in sorted({point.batch_size for point in points})
            if size in _counts_within(points, size, context)
        }
        if counts:
            ordered = tuple(mode for mode in MODES if mode in modes)
            designs.append(BonusDesign(counts=counts, context_tokens=context, modes=ordered))
    return tuple(designs)


def _counts_within(points: Collection[ForwardPoint], batch_size: int, context_tokens: int) -> tuple[int, ...]:
    if decode_point(batch_size, context_tokens) not in points:
        return ()
    return tuple(
        count
        for count in range(1, batch_size + 1)
        if decode_point(batch_size + count, context_tokens) in points
        and backfill_point(count, context_tokens) in points
    )


def _powers_and_itself(batch_size: int) -> tuple[int, ...]:
    return tuple(sorted({*(2**exponent for exponent in range(batch_size.bit_length())), batch_size}))
