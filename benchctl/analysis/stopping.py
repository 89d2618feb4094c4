"""A declared rule for ending early: measure until the answer is precise, whatever the answer is.

After a look's last block the half-width of the interval of every primary metric in every cell is held against the
precision; when all are within, the experiment ends. The looks are known before the first run.

Why that is fair: only the width decides, never where the interval lies. For normal log-ratios the mean and the
scatter of a sample are independent, so that a rule about scatter favours neither verdict, as one that waits for
significance does. It is not free: an experiment ends early where the scatter came out small by chance, and then the
interval is too narrow (F. J. Anscombe, *Large-sample theory of sequential estimation*, Mathematical Proceedings of
the Cambridge Philosophical Society 48, 1952, 600-607, shows that this vanishes only for many blocks).

Hence every interval, at the looks and in the comparison, is that of 1 - alpha / K for K looks (Bonferroni): the
chance that the interval of any look misses the truth is then at most alpha, whichever of them the rule picks and
however it picks. The constants of S. J. Pocock, *Group sequential methods in the design and analysis of clinical
trials*, Biometrika 64, 1977, 191-199, would be a little less strict (0.0182 in place of 0.0125 for four looks), but
hold for a known variance and looks of equal size; Bonferroni assumes nothing. It is owed whether or not the
experiment ended early.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from benchctl.analysis.metrics import run_metrics
from benchctl.analysis.pairing import CellPair, Side, match_cells
from benchctl.analysis.reconcile import profile_of
from benchctl.analysis.statistics import MIN_PAIRED_BLOCKS, Estimator, estimate_paired, log_ratios
from benchctl.records.directory import LoadedResults, LoadedRun
from benchctl.records.run import HalfWidth, Look, Manifest, ResultWarning, StoppingRecord


def num_looks_of(a: Manifest, b: Manifest) -> int:
    """At how many places two compared experiments could have ended; 1 where their numbers of blocks were fixed.

    Of two experiments the numbers are multiplied, because each end of one may meet each end of the other; one and
    the same (or its copy) counts once.
    """
    manifests = (a,) if a == b else (a, b)
    return math.prod(len(m.stopping.look_blocks) for m in manifests if m.stopping is not None)


def looks_notes(manifest: Manifest) -> tuple[ResultWarning, ...]:
    """What a reader of intervals that are not corrected for looks must know; nothing where there were none."""
    rule = manifest.stopping
    if rule is None or len(rule.look_blocks) == 1:
        return ()
    message = (
        f"the experiment could end at {len(rule.look_blocks)} looks; the intervals of these tables are not "
        "corrected for that, those of 'benchctl compare' are"
    )
    return (ResultWarning(code="could-end-early", message=message),)


def take_look(
    results: LoadedResults,
    rule: StoppingRecord,
    num_blocks: int,
    metrics: Sequence[str],
    *,
    left_out: Collection[str] = (),
) -> Look:
    """How precisely the primary ``metrics`` are known after ``num_blocks`` blocks.

    A block counts in a cell where both its runs are done and violate no gate. Cells in ``left_out`` (by label) and
    metrics that no run knows are not waited for; where nothing is left to wait for, nothing is precise.
    """
    values = _Values({})
    estimator = profile_of(results).comparison.estimator
    widths = tuple(
        _half_width(pair, name, blocks, rule.confidence, estimator)
        for pair in _pairs(results)
        if pair.b.label not in left_out
        for name in metrics
        if (blocks := _blocks(pair, name, num_blocks, values)) is not None
    )
    is_precise = bool(widths) and all(_is_within(width, rule.precision_frac) for width in widths)
    return Look(num_blocks=num_blocks, half_widths=widths, is_precise=is_precise)


def widest(look: Look) -> HalfWidth | None:
    """What holds the experiment up most: the widest interval, or one that is not known yet; None without any."""
    return max(look.half_widths, key=_width, default=None)


def _width(width: HalfWidth) -> float:
    return math.inf if width.half_width_frac is None else width.half_width_frac


def _is_within(width: HalfWidth, precision_frac: float) -> bool:
    return width.half_width_frac is not None and width.half_width_frac <= precision_frac


def _pairs(results: LoadedResults) -> Iterator[CellPair]:
    """The baseline against every cell of every other variant."""
    baseline = results.manifest.baseline
    others = dict.fromkeys(run.variant for run in results.plan.runs if run.variant != baseline)
    for other in others:
        yield from match_cells(results, Side(results.path, baseline), results, Side(results.path, other))


@dataclass(frozen=True, slots=True)
class _Values:
    """Metrics of each run, derived once: a baseline run meets many cells."""

    known: dict[str, dict[str, float | None]]

    def of(self, run: LoadedRun) -> dict[str, float | None]:
        run_id = run.record.run_id
        if run_id not in self.known:
            self.known[run_id] = run_metrics(run)
        return self.known[run_id]


@dataclass(frozen=True, slots=True)
class _Block:
    """One metric in one block on both sides, and the position of B in it less that of A."""

    a: float
    b: float
    positions: int


def _blocks(pair: CellPair, name: str, num_blocks: int, values: _Values) -> tuple[_Block, ...] | None:
    """The blocks that count; None where runs count and none of them knows the metric."""
    runs = [
        (a, b)
        for block, a, b in zip(pair.blocks, pair.a_runs, pair.b_runs, strict=True)
        if block < num_blocks and a.record.state == b.record.state == "done"
    ]
    found = []
    for a, b in runs:
        before, after = values.of(a)[name], values.of(b)[name]
        if before is not None and after is not None and min(before, after) > 0:
            found.append(_Block(before, after, b.record.position - a.record.position))
    return None if runs and not found else tuple(found)


def _half_width(
    pair: CellPair, name: str, blocks: Sequence[_Block], confidence: float, estimator: Estimator
) -> HalfWidth:
    """exp(half the interval of the logarithms) - 1; unknown below six blocks."""
    half = None
    if len(blocks) >= MIN_PAIRED_BLOCKS:
        differences = log_ratios([block.a for block in blocks], [block.b for block in blocks])
        positions = [block.positions for block in blocks]
        half = estimate_paired(differences, confidence, positions, estimator=estimator).half_width
    return HalfWidth(
        cell=pair.b.label,
        metric=name,
        num_blocks=len(blocks),
        half_width_frac=None if half is None else math.expm1(half),
    )
