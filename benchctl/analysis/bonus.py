"""Backfill of bonus tokens by batch expansion or by a prefill pass of its own: the passes to measure, the
cheaper way, and the verdict in sentences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product, takewhile
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from benchctl.analysis.compare.decide import joint_level
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, RatioEstimate, estimate_paired
from benchctl.errors import UsageError
from benchctl.profile.choices import MODES, ForwardPass, ForwardPoint, Mode
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import NS_PER_MS, percentage, range_of

Backfill: TypeAlias = Literal["expansion", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignRow:
    """One comparison of both ways of backfill, in one pair of modes."""

    context_tokens: int
    decode_mode: Mode
    prefill_mode: Mode
    batch_size: int
    bonus_tokens: int
    """Sequences of the batch that lack a bonus token."""

    @property
    def passes(self) -> tuple[tuple[ForwardPoint, Mode], ...]:
        """The step of the batch, the same step expanded by the bonus tokens, and their prefill pass."""
        expanded, context = self.batch_size + self.bonus_tokens, self.context_tokens
        backfill = ForwardPoint(phase="prefill", batch_size=self.bonus_tokens, context_tokens=context)
        return (
            (decode_point(self.batch_size, context), self.decode_mode),
            (decode_point(expanded, context), self.decode_mode),
            (backfill, self.prefill_mode),  # each bonus token is of a sequence of its own
        )


def decode_point(batch_size: int, context_tokens: int) -> ForwardPoint:
    """One decode step of a batch."""
    return ForwardPoint(phase="decode", batch_size=batch_size, context_tokens=context_tokens)


def bonus_design(
    batch_sizes: Sequence[int], context_tokens: int, modes: Sequence[Mode], *, every_count: bool = False
) -> tuple[DesignRow, ...]:
    """The comparisons at 1, the powers of two below the batch size, and the batch size itself as numbers of tokens.

    The last is the case in which every sequence lacks a token. With ``every_count`` these are all numbers from 1
    on. Raises UsageError for sizes that no batch has.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise UsageError(f"batch sizes {list(batch_sizes)}: give at least one, each 1 or more")
    if context_tokens < 1:
        raise UsageError(f"context of {context_tokens} tokens: a sequence in decode has 1 or more")
    counts = {
        size: range(1, size + 1) if every_count else {*(2**exponent for exponent in range(size.bit_length())), size}
        for size in sorted(set(batch_sizes))
    }
    return _rows(context_tokens, modes, {size: sorted(of_size) for size, of_size in counts.items()})


def _rows(context_tokens: int, modes: Sequence[Mode], counts: Mapping[int, Sequence[int]]) -> tuple[DesignRow, ...]:
    """Every comparison, by modes of the decode and of the prefill pass, batch size and number of tokens.

    Decode with graphs against prefill without is the choice that vLLM had: graphs were captured for decode only.
    """
    return tuple(
        DesignRow(
            context_tokens=context_tokens,
            decode_mode=decode_mode,
            prefill_mode=prefill_mode,
            batch_size=batch_size,
            bonus_tokens=count,
        )
        for decode_mode, prefill_mode in product(modes, modes)
        for batch_size, of_size in counts.items()
        for count in of_size
    )


def points_of(rows: Iterable[DesignRow]) -> tuple[ForwardPoint, ...]:
    """Every pass of the comparisons once: decodes, then prefills, each in ascending order of sequences."""
    points = {point for row in rows for point, _ in row.passes}
    return tuple(sorted(points, key=lambda point: (point.phase, point.batch_size)))


def measured_design(passes: Iterable[ForwardPass]) -> tuple[DesignRow, ...]:
    """All comparisons that these passes hold, in ascending order of contexts.

    A batch size counts if decodes at B and 2B and a prefill of B tokens are there in every mode of that context.
    Passes behind an empty cache are none of a design: nothing comes before a bonus token there.
    """
    of_contexts: dict[int, set[ForwardPass]] = {}
    for point, mode in passes:
        if point.context_tokens:
            of_contexts.setdefault(point.context_tokens, set()).add((point, mode))
    rows: list[DesignRow] = []
    for context, of_context in sorted(of_contexts.items()):
        modes = [mode for mode in MODES if any(mode == each for _, each in of_context)]
        sizes = sorted({point.batch_size for point, _ in of_context if point.phase == "decode"})
        candidates = _rows(context, modes, {size: range(1, size + 1) for size in sizes})
        lacking = {
            (row.batch_size, row.bonus_tokens) for row in candidates if not of_context.issuperset(row.passes)
        }
        rows += (
            row
            for row in candidates
            if lacking.isdisjoint({(row.batch_size, row.bonus_tokens), (row.batch_size, row.batch_size)})
        )
    return tuple(rows)


BlockTimes: TypeAlias = Mapping[ForwardPass, Mapping[int, float]]
"""Nanoseconds of one pass by point and mode, then by block."""
_FEWEST_BLOCKS: Final = 3
"""Of an interval: two values have one degree of freedom, and bounds twelve times their scatter apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillComparison(DesignRow):
    """Both ways of backfill for ``bonus_tokens`` sequences of a batch, in one pair of modes.

    Times are nanoseconds over the blocks, without an interval where these are fewer than ``_FEWEST_BLOCKS``.
    """

    num_blocks: int
    decode_ns: Estimate
    """The step that is expanded, by itself."""
    expansion_ns: Estimate
    prefill_ns: Estimate
    difference_ns: Estimate
    """Expansion minus prefill, at the level that all rows share."""

    @property
    def cheaper(self) -> Backfill | None:
        """None where the interval holds 0, or too few blocks allow no verdict."""
        low, high = self.difference_ns.low, self.difference_ns.high
        if low is None or high is None or self.num_blocks < MIN_PAIRED_BLOCKS:
            return None
        return "expansion" if high < 0 else "prefill" if low > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillVerdict:
    """All comparisons behind one context, which hold together with ``confidence``."""

    context_tokens: int
    confidence: float
    row_confidence: float
    """Confidence of the interval of each difference."""
    comparisons: tuple[BackfillComparison, ...]

    @property
    def mode_pairs(self) -> tuple[tuple[Mode, Mode], ...]:
        return tuple(dict.fromkeys((row.decode_mode, row.prefill_mode) for row in self.comparisons))

    def rows(self, *modes: Mode) -> tuple[BackfillComparison, ...]:
        """Rows of one pair of modes, that of the decode and that of the prefill pass."""
        return tuple(row for row in self.comparisons if (row.decode_mode, row.prefill_mode) == modes)


def judge_backfill(times: BlockTimes, design: Sequence[DesignRow], confidence: float = 0.95) -> BackfillVerdict:
    """The verdict of every row of a design behind one context, all passes of which share a block."""
    blocks_of = {row: _common_blocks(times, row) for row in design}
    estimates = {}
    for row, blocks in blocks_of.items():
        decode, expanded, prefill = (np.array([times[each][block] for block in blocks]) for each in row.passes)
        expansion = expanded - decode
        parts = (decode, expansion, prefill, expansion - prefill)
        estimates[row] = [estimate_paired(ns.tolist(), confidence) for ns in parts]
    scores = []
    for row, (*_, difference) in estimates.items():
        if difference.uncertainty is not None:
            scores.append(difference.block_scores(blocks_of[row]))
    level = joint_level(scores, 1 - confidence) if scores else 1 - confidence
    return BackfillVerdict(
        context_tokens=design[0].context_tokens,
        confidence=confidence,
        row_confidence=1 - level,
        comparisons=tuple(
            BackfillComparison(
                **asdict(row),
                num_blocks=len(blocks_of[row]),
                decode_ns=_cost_ns(decode, confidence),
                expansion_ns=_cost_ns(expansion, confidence),
                prefill_ns=_cost_ns(prefill, confidence),
                difference_ns=_cost_ns(difference, 1 - level),
            )
            for row, (decode, expansion, prefill, difference) in estimates.items()
        ),
    )


def _common_blocks(times: BlockTimes, row: DesignRow) -> tuple[int, ...]:
    """The blocks in which all passes of a row were measured."""
    return tuple(sorted(set.intersection(*(set(times.get(each, {})) for each in row.passes))))


def _cost_ns(estimate: RatioEstimate, confidence: float) -> Estimate:
    """The cost in an estimate over blocks, whose ``log_ratio`` is in nanoseconds here."""
    interval = None if estimate.num_blocks < _FEWEST_BLOCKS else estimate.interval_at(confidence)
    low, high = interval or (None, None)
    return Estimate(estimate.log_ratio, low, high)


def cheaper_from(rows: Iterable[BackfillComparison]) -> tuple[Backfill, int, int] | None:
    """The way that is cheaper in every row from some batch size on, that size and the largest measured one.

    None where the largest has no verdict.
    """
    ways: dict[int, set[Backfill | None]] = {}
    for row in rows:
        ways.setdefault(row.batch_size, set()).add(row.cheaper)
    sizes = sorted(ways, reverse=True)
    (way, *others) = ways[sizes[0]] if sizes else (None,)
    if way is None or others:
        return None
    alike = takewhile(lambda size: ways[size] == {way}, sizes)
    return way, list(alike)[-1], sizes[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBonus:
    """The verdicts of a result directory, one for each context."""

    path: Path
    model: str
    device: str
    dtype: str
    verdicts: tuple[BackfillVerdict, ...]
    missing: tuple[str, ...] = ()
    """Sentences on planned comparisons that have no row, because a pass of theirs does not count."""

    @property
    def cheaper(self) -> list[Backfill | None]:
        """The verdict of every row, None for those without one."""
        return [row.cheaper for verdict in self.verdicts for row in verdict.comparisons]

    @property
    def is_decided(self) -> bool:
        """Every planned comparison has a verdict."""
        return not self.missing and None not in self.cheaper

    @property
    def where(self) -> str:
        return f"{self.model}, {self.dtype}, on {self.device}"


def measured_bonus(path: Path, *, allow_suspect: bool = False) -> MeasuredBonus:
    """The verdicts on the passes of a directory that ``benchctl micro`` measured.

    Raises UsageError for a directory of requests, and for one without the passes of a comparison.
    """
    experiment = load_experiment(path, allow_suspect=allow_suspect)
    kind = experiment.profile.engine.kind
    if kind != "micro":
        raise UsageError(
            f"{path} holds requests to engine {kind!r}; name a directory that 'benchctl micro bonus' measured"
        )
    bonus = bonus_of(experiment)
    if bonus is None or not bonus.verdicts:
        raise UsageError(
            f"{path} has no batch size B with decodes at B and 2B and a prefill of B single tokens behind the same "
            "context, in runs that count; measure one with 'benchctl micro bonus'"
        )
    return bonus


def bonus_of(experiment: Experiment) -> MeasuredBonus | None:
    """The verdicts of an experiment; None for one whose plan compares no ways of backfill.

    The planned passes say what an experiment is about, and not its name, which anyone may change: it compares
    where ``measured_design`` recognises a design in them. Of ``benchctl micro`` only ``bonus`` plans a prefill
    behind tokens in the cache.
    """
    settings = [experiment.settings(planned) for planned in experiment.results.plan.runs]
    passes = [each.server.forward_pass for each in settings if each is not None]
    planned = measured_design(each for each in passes if each is not None)
    if not planned:
        return None
    times, verdicts, missing = _block_times(experiment), [], []
    held = {row for row in measured_design(times) if _common_blocks(times, row)}
    for context, of_context in groupby(planned, key=lambda row: row.context_tokens):
        design = list(of_context)
        if judged := [row for row in design if row in held]:
            verdicts.append(judge_backfill(times, judged))
        if lost := [row for row in design if row not in held]:
            sizes = dict.fromkeys(str(row.batch_size) for row in lost)
            missing.append(
                f"{len(lost)} of {len(design)} comparisons behind {context} tokens in the cache are missing, "
                f"at batch {', '.join(sizes)}: not every pass of theirs is in a run that counts"
            )
    records = [run.record for run in experiment.results.runs]
    config = next((record.effective_config for record in records if record.effective_config), {})
    return MeasuredBonus(
        path=experiment.path,
        model=experiment.profile.model,
        device=str(config.get("server.device_name", "an unknown device")),
        dtype=str(config.get("server.dtype", "an unknown type")),
        verdicts=tuple(verdicts),
        missing=tuple(missing),
    )


def _block_times(experiment: Experiment) -> BlockTimes:
    """The median of the replays of each pass in each block, from runs that count."""
    times: dict[ForwardPass, dict[int, float]] = {}
    for run in experiment.results.runs:
        settings, median_ms = experiment.settings(run.record), experiment.metrics(run)["p50_step_ms"]
        forward_pass = None if settings is None else settings.server.forward_pass
        if forward_pass is not None and median_ms is not None and experiment.usability(run).is_usable:
            times.setdefault(forward_pass, {})[run.record.block] = median_ms * NS_PER_MS
    return times


_WAYS: Final[dict[Backfill, str]] = {"expansion": "batch expansion", "prefill": "a prefill pass"}
_MODES: Final[dict[Mode, str]] = {"eager": "without graphs", "graph": "with graphs"}


def modes_in_words(decode_mode: Mode, prefill_mode: Mode) -> str:
    """``decode with graphs, prefill without graphs``."""
    if decode_mode == prefill_mode:
        return f"decode and prefill {_MODES[decode_mode]}"
    return f"decode {_MODES[decode_mode]}, prefill {_MODES[prefill_mode]}"


def context_in_words(verdict: BackfillVerdict) -> str:
    """``128 tokens in the cache of each sequence``."""
    return f"{verdict.context_tokens} tokens in the cache of each sequence"


def bonus_headline(bonus: MeasuredBonus) -> str:
    """The number of decided comparisons, and the answer at each context for each pair of modes."""
    if not bonus.cheaper:
        return "no comparison of ways of backfill has all its passes"
    num_decided = sum(way is not None for way in bonus.cheaper)
    decided = "" if bonus.is_decided else f"{num_decided} of {len(bonus.cheaper)} comparisons are decided; "
    answers = []
    for verdict in bonus.verdicts:
        context = f"behind {verdict.context_tokens} tokens, " if len(bonus.verdicts) > 1 else ""
        answers += [f"{context}{sentence}" for sentence in _answers(verdict)]
    return decided + "; ".join(answers)


def verdict_sentences(verdict: BackfillVerdict) -> list[str]:
    """One sentence for each pair of modes, and one on how certain all intervals are together."""
    blocks = range_of([row.num_blocks for row in verdict.comparisons])
    together = (
        f"all intervals hold at the same time with {percentage(verdict.confidence)} confidence, each alone with "
        f"{percentage(verdict.row_confidence, 4)}, over {blocks} blocks"
    )
    has_intervals = any(row.difference_ns.low is not None for row in verdict.comparisons)
    return [*_answers(verdict), *([together] if has_intervals else [])]


def _answers(verdict: BackfillVerdict) -> list[str]:
    return [f"{modes_in_words(*modes)}: {_cheaper_way(verdict.rows(*modes))}" for modes in verdict.mode_pairs]


def _cheaper_way(rows: Sequence[BackfillComparison]) -> str:
    blocks = min(row.num_blocks for row in rows)
    if blocks < MIN_PAIRED_BLOCKS:
        return f"no verdict from {blocks} blocks; {MIN_PAIRED_BLOCKS} are the least that give one (--blocks)"
    every, rows_of_all = cheaper_from(rows), [row for row in rows if row.bonus_tokens == row.batch_size]
    if (answer := every or cheaper_from(rows_of_all)) is None:
        size = rows_of_all[-1].batch_size
        return f"inconclusive at batch {size}, whose interval holds 0; more blocks may decide it (--blocks)"
    way, least, most = answer
    sizes = f"at batch {least}" if least == most else f"from batch {least} on (measured up to {most})"
    cheaper = f"{_WAYS[way]} is cheaper {sizes}"
    if every is not None:
        return f"{cheaper}, for every number of tokens"
    return f"where every sequence lacks a token, {cheaper}; for fewer tokens see the table"
