"""The declared rule for ending early: measure until the answer is precise, whatever the answer is.

After a look's last block the half-width of the interval of every primary metric in every cell is held against the
precision; when all are within, the experiment ends. The looks are known before the first run.

The rule is fair because only the width of the interval decides, never its position. For normal log-ratios the mean
and the scatter of a sample are independent, so that a rule about scatter favours neither verdict, as one that waits
for significance does. It is not free: an experiment ends early where the scatter came out small by chance, and then
the interval is too narrow (F. J. Anscombe, *Large-sample theory of sequential estimation*, Mathematical Proceedings
of the Cambridge Philosophical Society 48, 1952, 600-607, shows that this vanishes only for many blocks).

Hence every interval, at the looks and in the comparison, is that of 1 - alpha / K for K looks (Bonferroni): the
chance that the interval of any look misses the truth is then at most alpha, whichever of them the rule picks and
however it picks. The constants of S. J. Pocock, *Group sequential methods in the design and analysis of clinical
trials*, Biometrika 64, 1977, 191-199, would be a little less strict (0.0182 in place of 0.0125 for four looks), but
hold for a known variance and looks of equal size; Bonferroni assumes nothing. It is owed whether or not the
experiment ended early.
"""

import math
from collections.abc import Collection, Sequence

from benchctl.analysis.experiment.deciding import deciding_between
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import Side, match_cells
from benchctl.analysis.statistics.screening import MIN_PAIRED_BLOCKS
from benchctl.records.manifest import HalfWidth, Look, Manifest, StoppingRecord


def num_looks_of(a: Manifest, b: Manifest) -> int:
    """Number of looks at which two compared experiments could have ended; 1 where their blocks were fixed.

    Who adds blocks to an experiment could have ended it before: every extension is one more look, whether or not
    anybody looked. Of two experiments the numbers are multiplied, because each end of one may meet each end of the
    other.
    """
    manifests = (a,) if a == b else (a, b)
    return math.prod(
        len(m.stopping.look_blocks) if m.stopping is not None else 1 + len(m.extensions) for m in manifests
    )


def num_extensions_of(a: Manifest, b: Manifest) -> int:
    """Number of times that blocks were added to either of two experiments."""
    return len(a.extensions) + (0 if a == b else len(b.extensions))


def take_look(
    experiment: Experiment,
    rule: StoppingRecord,
    num_blocks: int,
    metrics: Sequence[str],
    *,
    left_out: Collection[str] = (),
) -> Look:
    """The precision of the primary ``metrics`` after ``num_blocks`` blocks.

    A block counts where it counts in a comparison, and so does a metric (``deciding_between``). Cells in
    ``left_out`` (by label) are ignored; where nothing remains, the look is not precise.
    """
    so_far = experiment.first_blocks(num_blocks)
    results, baseline = so_far.results, so_far.results.manifest.baseline
    others = dict.fromkeys(run.variant for run in results.plan.runs if run.variant != baseline)
    sides = [(Side(results.path, baseline), Side(results.path, other)) for other in others]
    widths = tuple(
        width
        for a, b in sides
        for pair in match_cells(so_far, a, so_far, b)
        if pair.b.label not in left_out
        for name in deciding_between(metrics, pair, (so_far, so_far)).names
        if (width := _half_width(PairedRuns.of(pair, (so_far, so_far)), name, rule.confidence)) is not None
    )
    is_precise = bool(widths) and all(_width(width) <= rule.precision_frac for width in widths)
    return Look(num_blocks=num_blocks, half_widths=widths, is_precise=is_precise)


def widest_interval(look: Look) -> HalfWidth | None:
    """The widest interval, an unknown one first: what keeps the experiment from ending. None without any."""
    return max(look.half_widths, key=_width, default=None)


def _width(width: HalfWidth) -> float:
    return math.inf if width.half_width_frac is None else width.half_width_frac


def _half_width(paired: PairedRuns, name: str, confidence: float) -> HalfWidth | None:
    """exp(half the interval of the logarithms) - 1; unknown below six blocks.

    None where all runs know the metric and it has no ratio, such as a count that is zero.
    """
    ratio = paired.ratio(name, confidence)
    if ratio is None and paired.pair.a_runs and all(m[name] is not None for side in paired.metrics() for m in side):
        return None
    num_blocks = 0 if ratio is None else ratio.estimate.num_blocks
    half = ratio.estimate.half_width if ratio is not None and num_blocks >= MIN_PAIRED_BLOCKS else None
    return HalfWidth(
        cell=paired.pair.b.label,
        metric=name,
        num_blocks=num_blocks,
        half_width_frac=None if half is None else math.expm1(half),
    )
