"""The forward passes that tell the two ways of backfill apart."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

from benchctl.errors import UsageError
from benchctl.micro.point import ForwardPoint, Mode

Backfill: TypeAlias = Literal["expansion", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BonusDesign:
    """Batch sizes at which both ways are compared, and the modes in which their passes run.

    Each batch size is compared at several numbers of bonus tokens: 1, the powers of two below the batch size, and
    the batch size itself, where every sequence lacks one. With ``is_every_count`` these are all numbers from 1
    on.
    """

    batch_sizes: tuple[int, ...]
    context_tokens: int
    modes: tuple[Mode, ...] = ("eager",)
    is_every_count: bool = False

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise UsageError(f"batch sizes {list(self.batch_sizes)}: give at least one, each 1 or more")
        if self.context_tokens < 1:
            raise UsageError(f"context of {self.context_tokens} tokens: a sequence in decode has 1 or more")

    def bonus_counts(self, batch_size: int) -> tuple[int, ...]:
        """Numbers of bonus tokens at which this batch size is compared, in ascending order."""
        if self.is_every_count:
            return tuple(range(1, batch_size + 1))
        powers = (2**exponent for exponent in range(batch_size.bit_length()))
        return tuple(sorted({*powers, batch_size}))

    @property
    def points(self) -> tuple[ForwardPoint, ...]:
        """Every pass of the comparison once: decodes, then prefills, each in ascending order of sequences."""
        decodes: set[int] = set(self.batch_sizes)
        prefills: set[int] = set()
        for batch_size in self.batch_sizes:
            counts = self.bonus_counts(batch_size)
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


def decode_point(batch_size: int, context_tokens: int) -> ForwardPoint:
    """One decode step of a batch."""
    return ForwardPoint(phase="decode", batch_size=batch_size, context_tokens=context_tokens)


def backfill_point(num_tokens: int, context_tokens: int) -> ForwardPoint:
    """The prefill pass of ``num_tokens`` bonus tokens, each of a sequence of its own."""
    return ForwardPoint(phase="prefill", batch_size=num_tokens, new_tokens=1, context_tokens=context_tokens)


def batch_sizes_within(points: Iterable[ForwardPoint], context_tokens: int) -> tuple[int, ...]:
    """Batch sizes B that can be compared with these passes: decodes at B and 2B, and a prefill of B tokens."""
    measured = frozenset(points)
    sizes = sorted(
        point.batch_size
        for point in measured
        if point == decode_point(point.batch_size, context_tokens)
        and decode_point(2 * point.batch_size, context_tokens) in measured
        and backfill_point(point.batch_size, context_tokens) in measured
    )
    return tuple(sizes)
