"""Expansion against a prefill pass, block by block: costs, their intervals, and the cheaper way.

The unit is the block, which has a worker process of its own; a pass has one time in it, the median of its
replays. In each block

    expansion  X = T_decode(B + m) - T_decode(B)
    prefill    P = T_prefill(m)
    difference d = X - P

so that what moves a whole block moves both. The centre of d over the blocks, its interval and the weight of
outlying blocks are those of every comparison (``statistics.block_ratio``); d is a difference of times instead of
logarithms, because X may be 0 or below it. All rows of a verdict share one level (``statistics.multiplicity``):
the chance that any of its intervals misses is at most 1 - confidence, so statements over several batch sizes are
as safe as a single one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from benchctl.analysis.bonus.design import Backfill, BonusDesign, DesignRow, backfill_point, decode_point
from benchctl.analysis.statistics.block_ratio import MIN_PAIRED_BLOCKS, RatioEstimate, estimate_paired
from benchctl.analysis.statistics.multiplicity import BlockScores, joint_level
from benchctl.errors import UsageError
from benchctl.profile.sections.forward_pass import ForwardPass, Mode

BlockTimes: TypeAlias = Mapping[ForwardPass, Mapping[int, float]]
"""Nanoseconds of one pass by point and mode, then by block."""
_FEWEST_BLOCKS: Final = 3
"""Of an interval: two values have one degree of freedom, and bounds twelve times their scatter apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Nanoseconds over the blocks; the bounds are None with fewer than ``_FEWEST_BLOCKS``."""

    centre_ns: float
    low_ns: float | None
    high_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both ways of backfill for ``bonus_tokens`` sequences of a batch, in one pair of modes."""

    batch_size: int
    bonus_tokens: int
    decode_mode: Mode
    prefill_mode: Mode
    num_blocks: int
    decode: Cost
    """The step that is expanded, by itself."""
    expansion: Cost
    prefill: Cost
    difference: Cost
    """Expansion minus prefill, at the level that all rows share."""

    @property
    def cheaper(self) -> Backfill | None:
        """None where the interval holds 0, or too few blocks allow no verdict."""
        low, high = self.difference.low_ns, self.difference.high_ns
        if low is None or high is None or self.num_blocks < MIN_PAIRED_BLOCKS:
            return None
        return "expansion" if high < 0 else "prefill" if low > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheaperFrom:
    """One way is the cheaper one at every measured batch size from ``batch_size`` on."""

    way: Backfill
    batch_size: int
    up_to: int
    """The largest batch size that was measured; beyond it nothing is claimed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillVerdict:
    """All comparisons, which hold together with ``confidence``."""

    confidence: float
    row_confidence: float
    """Confidence of the interval of each difference."""
    comparisons: tuple[Comparison, ...]

    @property
    def mode_pairs(self) -> tuple[tuple[Mode, Mode], ...]:
        return tuple(dict.fromkeys((row.decode_mode, row.prefill_mode) for row in self.comparisons))

    def rows(self, decode_mode: Mode, prefill_mode: Mode, *, only_all: bool = False) -> tuple[Comparison, ...]:
        """Rows of one pair of modes; with ``only_all`` those where every sequence of the batch lacks a token."""
        return tuple(
            row
            for row in self.comparisons
            if (row.decode_mode, row.prefill_mode) == (decode_mode, prefill_mode)
            and not (only_all and row.bonus_tokens != row.batch_size)
        )


def judge_backfill(times: BlockTimes, design: BonusDesign, confidence: float = 0.95) -> BackfillVerdict:
    """The verdict of every batch size, number of bonus tokens and pair of modes of the design.

    Raises UsageError, with the passes that lack, where ``times`` does not hold the design in a common block.
    """
    estimated = [_comparison(times, row, confidence) for row in design.rows]
    scores = [_scores(blocks, estimate) for _, estimate, blocks in estimated if estimate.block_weights]
    level = joint_level(scores, 1 - confidence) if scores else 1 - confidence
    return BackfillVerdict(
        confidence=confidence,
        row_confidence=1 - level,
        comparisons=tuple(
            replace(comparison, difference=_cost(estimate, 1 - level)) for comparison, estimate, _ in estimated
        ),
    )


def cheaper_from(rows: Iterable[Comparison]) -> CheaperFrom | None:
    """The way that is cheaper in every row from some batch size on; None where the largest has no verdict."""
    ways: dict[int, set[Backfill | None]] = {}
    for row in rows:
        ways.setdefault(row.batch_size, set()).add(row.cheaper)
    sizes = sorted(ways, reverse=True)
    if not sizes or len(ways[sizes[0]]) != 1:
        return None
    (way,) = ways[sizes[0]]
    if way is None:
        return None
    least = sizes[0]
    for size in sizes:
        if ways[size] != {way}:
            break
        least = size
    return CheaperFrom(way=way, batch_size=least, up_to=sizes[0])


def cost_over_blocks(values_ns: Sequence[float], confidence: float = 0.95) -> Cost:
    """The centre of one value for each block, with its own interval."""
    return _cost(_estimate(values_ns, confidence), confidence)


def _comparison(
    times: BlockTimes, row: DesignRow, confidence: float
) -> tuple[Comparison, RatioEstimate, tuple[int, ...]]:
    """One row, the estimate of its difference, and the blocks that it is from."""
    context_tokens, decode_mode, prefill_mode, batch_size, count = row
    keys = (
        (decode_point(batch_size, context_tokens), decode_mode),
        (decode_point(batch_size + count, context_tokens), decode_mode),
        (backfill_point(count, context_tokens), prefill_mode),
    )
    blocks = _common_blocks(times, keys)
    decode, expanded, prefill = ([times[key][block] for block in blocks] for key in keys)
    expansion = [after - before for before, after in zip(decode, expanded, strict=True)]
    difference = _estimate([x - p for x, p in zip(expansion, prefill, strict=True)], confidence)
    comparison = Comparison(
        batch_size=batch_size,
        bonus_tokens=count,
        decode_mode=decode_mode,
        prefill_mode=prefill_mode,
        num_blocks=len(blocks),
        decode=cost_over_blocks(decode, confidence),
        expansion=cost_over_blocks(expansion, confidence),
        prefill=cost_over_blocks(prefill, confidence),
        difference=_cost(difference, confidence),
    )
    return comparison, difference, blocks


def _common_blocks(times: BlockTimes, keys: Sequence[ForwardPass]) -> tuple[int, ...]:
    """Blocks in which all of these passes were measured."""
    blocks = set.intersection(*(set(times.get(key, {})) for key in keys))
    if not blocks:
        names = ", ".join(f"{point.phase} of {point.batch_size} sequences ({mode})" for point, mode in keys)
        raise UsageError(f"no block has all of {names}; measure them together with benchctl micro bonus")
    return tuple(sorted(blocks))


def _estimate(values_ns: Sequence[float], confidence: float) -> RatioEstimate:
    """The centre of one value for each block; ``log_ratio`` of this estimate is in nanoseconds."""
    return estimate_paired(values_ns, confidence)


def _cost(estimate: RatioEstimate, confidence: float) -> Cost:
    interval = None if estimate.num_blocks < _FEWEST_BLOCKS else estimate.interval_at(confidence)
    low, high = interval or (None, None)
    return Cost(centre_ns=estimate.log_ratio, low_ns=low, high_ns=high)


def _scores(blocks: tuple[int, ...], estimate: RatioEstimate) -> BlockScores:
    """The contribution of each block to the estimate, beyond the centre."""
    weights_and_residuals = zip(estimate.block_weights, estimate.residuals, strict=True)
    return BlockScores(blocks, tuple(weight * residual for weight, residual in weights_and_residuals))
