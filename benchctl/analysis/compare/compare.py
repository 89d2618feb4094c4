"""The verdict: two sides, matched cell by cell and block by block, judged against a margin.

    sides ▸ load ▸ match cells ▸ require comparable ▸ metrics and checks of each run ▸ estimates ▸ verdict

A pure function of the directories: no clock, no randomness, and the same numbers on every machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchctl.analysis.compare.answers import AnswerOptions, with_answers
from benchctl.analysis.compare.attribution import with_decompositions
from benchctl.analysis.compare.distrust import explain_client_exclusions, mark_bounded, mark_unreliable
from benchctl.analysis.compare.metric_comparison import (
    MetricComparison,
    Role,
    Rules,
    compare_metrics,
    judge_metric,
    roles_of,
)
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.warnings import counted_suspects, measurement_warnings, statistical_warnings
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import CellPair, Side, match_cells, parse_side
from benchctl.analysis.experiment.stopping import num_looks_of
from benchctl.analysis.metrics.request_timing import is_completed, measured
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.block_ratio import Estimator
from benchctl.analysis.statistics.margins import decision_alpha
from benchctl.analysis.statistics.multiplicity import BlockScores, holm_levels, joint_levels
from benchctl.analysis.validity.comparability import (
    Difference,
    configuration_differences,
    experiment_differences,
    refused_differences,
    require_comparable,
)
from benchctl.analysis.validity.integrity import require_intact
from benchctl.analysis.validity.run_differences import run_differences
from benchctl.errors import UsageError
from benchctl.profile.sources.files import nearest
from benchctl.records.directory import LoadedRun
from benchctl.records.noise import MetricNoise, load_noise
from benchctl.records.run import ResultWarning

__all__ = ["CompareOptions", "Side", "compare_experiments", "compare_sides", "parse_side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How to compare. ``metrics`` replaces the profile's primary metrics; ``allow`` adds allowed differences.

    ``allow_failed`` judges what completed although requests failed, ``allow_suspect`` counts suspect runs,
    ``allow_altered`` judges files as they are although they are not what was measured.
    """

    margin_frac: float = 0.01
    """The threshold: a smaller change does not count."""
    equivalence_margin_frac: float | None = None
    """Inside it two sides are called equivalent; None: inside the threshold."""
    confidence: float = 0.95
    estimator: Estimator | None = None
    """None: that of the profile."""
    metrics: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    allow_failed: bool = False
    allow_suspect: bool = False
    allow_altered: bool = False
    noise: Mapping[str, MetricNoise] | None = None
    """Noise floors by metric; None: those that lie in the directories, ``{}``: none."""
    judge: str = "numeric"
    """Of answers, where there are gold ones."""
    quality_margin_points: float | None = None
    """Margin with which quality decides, too; None: it is told and decides nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.margin_frac < 1:
            raise UsageError(
                f"the threshold is {self.margin_frac:.3g}; it is a fraction from 0 to below 1: 0.01 or 1%"
            )
        if self.equivalence_margin_frac is not None and not 0 < self.equivalence_margin_frac < 1:
            raise UsageError(
                f"the equivalence margin is {self.equivalence_margin_frac:.3g}; it is a fraction above 0 and "
                "below 1: 0.02 or 2%"
            )
        if not 0.5 <= self.confidence < 1:
            raise UsageError(
                f"the confidence is {self.confidence:.3g}; it lies from 0.5 to below 1, for example 0.95"
            )


def compare_sides(a_side: Side, b_side: Side, options: CompareOptions) -> Comparison:
    """Compare B with A.

    Raises NotComparableError when they differ in more than what was declared, AlteredError when they are not what
    was measured, RecordError when results are damaged, UsageError for a variant or metric that does not exist.
    """
    a = load_experiment(a_side.path, allow_suspect=options.allow_suspect)
    is_one = b_side.path.resolve() == a_side.path.resolve()
    b = a if is_one else load_experiment(b_side.path, allow_suspect=options.allow_suspect)
    return compare_experiments((a, a_side), (b, b_side), options)


def compare_experiments(
    a_given: tuple[Experiment, Side], b_given: tuple[Experiment, Side], options: CompareOptions
) -> Comparison:
    """``compare_sides`` of directories that were loaded; ``a_given[0] is b_given[0]`` where they are one.

    Whether suspect runs count is a matter of how they were loaded.
    """
    (a, a_side), (b, b_side) = a_given, b_given
    deciding = deciding_metrics(options.metrics or a.profile.primary_metrics)
    pairs = match_cells(a, a_side, b, b_side)
    altered, allowed = _require_comparable((a, b), pairs, options)
    num_looks = num_looks_of(a.results.manifest, b.results.manifest)
    confidence = 1 - (1 - options.confidence) / num_looks
    rules = Rules(
        margin_frac=options.margin_frac,
        confidence=confidence,
        is_paired=pairs[0].pairing != "unpaired",
        noise=noise_of(a, b) if options.noise is None else options.noise,
        equivalence_margin_frac=options.equivalence_margin_frac,
        estimator=options.estimator or a.estimator,
    )
    roles = roles_of(deciding, is_forced=a.results.manifest.stop != "natural")
    facing = [PairedRuns.of(pair, (a, b)) for pair in pairs]
    compared = [_compare_cell(cell, roles, rules, allow_failed=options.allow_failed) for cell in facing]
    answers = AnswerOptions(judge=options.judge, margin_points=options.quality_margin_points, confidence=confidence)
    answered = with_answers(correct_for_multiple_tests(compared, confidence), pairs, (a, b), answers)
    cells = with_decompositions(answered, facing, confidence, rules.estimator)
    checks = [(run, check) for cell in facing for run, check in cell.checks()]
    names = side_names(a_side, b_side)
    counted = counted_suspects(pairs, names) if a.allow_suspect or b.allow_suspect else ()
    return Comparison(
        a_name=names[0],
        b_name=names[1],
        pairing=pairs[0].pairing,
        margin_frac=options.margin_frac,
        equivalence_margin_frac=options.equivalence_margin_frac,
        confidence=confidence,
        num_looks=num_looks,
        cells=cells,
        allowed=allowed,
        warnings=(
            *altered,
            *counted,
            *measurement_warnings(a.results, b.results, pairs, checks),
            *statistical_warnings(cells),
        ),
        noise={name: noise for name, noise in rules.noise.items() if name in deciding},
    )


def _require_comparable(
    sides: tuple[Experiment, Experiment], pairs: Sequence[CellPair], options: CompareOptions
) -> tuple[tuple[ResultWarning, ...], tuple[Difference, ...]]:
    """What was altered and is allowed, and what differs beside the declared factor and may.

    Raises AlteredError and NotComparableError for what may not.
    """
    a, b = sides
    manifests = a.results.manifest, b.results.manifest
    runs_of_cells = {pair.label: (pair.a_runs, pair.b_runs) for pair in pairs}
    differences = (
        *experiment_differences(*manifests),
        *configuration_differences(
            runs_of_cells, has_one_host=manifests[0].host.hostname == manifests[1].host.hostname
        ),
        *run_differences(runs_of_cells, has_one_experiment=manifests[0] == manifests[1]),
    )
    shared = tuple(p for p in a.profile.allowed_differences if p in b.profile.allowed_differences)
    patterns = (*shared, *options.allow)
    refused = refused_differences(differences, patterns)
    altered = require_intact(a.results, b.results, refused, allow_altered=options.allow_altered)
    return altered, require_comparable(differences, patterns)


def noise_of(a: Experiment, b: Experiment) -> dict[str, MetricNoise]:
    """The noise that lies in the directories; of two, the larger floor of each metric."""
    found: dict[str, MetricNoise] = {}
    for experiment in (a,) if a is b else (a, b):
        floor = load_noise(experiment.path)
        for name, noise in floor.metrics.items() if floor is not None else ():
            if name not in found or noise.floor_frac > found[name].floor_frac:
                found[name] = noise
    return found


def correct_for_multiple_tests(cells: Sequence[CellComparison], confidence: float) -> tuple[CellComparison, ...]:
    """With the deciding verdicts of all cells made together: the chance of any wrong one is 1 - confidence."""
    tests = [(c, i, m) for c, cell in enumerate(cells) for i, m in enumerate(cell.metrics) if _is_tested(m)]
    metrics = [list(cell.metrics) for cell in cells]
    levels = _levels([metric for _, _, metric in tests], 1 - confidence)
    for (c, i, metric), level in zip(tests, levels, strict=True):
        metrics[c][i] = judge_metric(metric, 1 - level)
    return tuple(replace(cell, metrics=tuple(m)) for cell, m in zip(cells, metrics, strict=True))


def _levels(metrics: Sequence[MetricComparison], alpha: float) -> tuple[float, ...]:
    """The alpha at which each is judged: together where the sides share blocks, by Holm where not."""
    scored = [(i, found) for i, metric in enumerate(metrics) if (found := _scores(metric)) is not None]
    if scored:

        def decides(index: int, level: float) -> bool:
            return judge_metric(metrics[scored[index][0]], 1 - level).verdict != "inconclusive"

        levels = [alpha] * len(metrics)
        for (i, _), level in zip(scored, joint_levels([found for _, found in scored], decides, alpha), strict=True):
            levels[i] = level
        return tuple(levels)
    return holm_levels([_p_value(metric) for metric in metrics], alpha)


def _scores(metric: MetricComparison) -> BlockScores | None:
    """What each block adds to the estimate; None where the sides share none, or too few for a verdict."""
    estimate = metric.estimate
    if estimate is None or not estimate.block_weights or metric.is_screening:
        return None
    weighted = zip(estimate.block_weights, estimate.residuals, strict=True)
    return BlockScores(
        blocks=metric.blocks,
        scores=tuple(weight * residual for weight, residual in weighted),
    )


def _p_value(metric: MetricComparison) -> float:
    """That of its verdict; 1 where there are too few blocks for one."""
    if metric.estimate is None or metric.is_screening:
        return 1.0
    return decision_alpha(metric.estimate, metric.margins)


def _is_tested(metric: MetricComparison) -> bool:
    return metric.role == "deciding" and metric.estimate is not None and not metric.is_unreliable


def deciding_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """Metrics that make the verdict. Raises UsageError for one that is unknown or has no better direction."""
    for name in names:
        if name not in METRICS:
            near = nearest(name, METRICS)
            hint = f"did you mean {near!r}?" if near else f"metrics are {', '.join(METRICS)}"
            raise UsageError(f"no metric is called {name!r}; {hint}")
        if METRICS[name].direction == "none" and not METRICS[name].is_exact:
            raise UsageError(
                f"{name} cannot decide a comparison: neither more nor less of it is better. "
                "It is shown as exploratory; name others with --metrics, or as primary_metrics of the profile"
            )
    return tuple(dict.fromkeys(names))


def side_names(a: Side, b: Side) -> tuple[str, str]:
    """The shortest names that tell the two sides apart."""
    if a.variant and b.variant and a.variant != b.variant:
        return a.variant, b.variant
    short = (a.path.resolve().name, b.path.resolve().name)
    return short if short[0] != short[1] else (str(a), str(b))


def _compare_cell(
    cell: PairedRuns, roles: Mapping[str, Role], rules: Rules, *, allow_failed: bool
) -> CellComparison:
    pair, runs = cell.pair, cell.runs
    compared = compare_metrics(*cell.metrics(), roles, replace(rules, slopes=cell.slopes()), cell.design)
    metrics = tuple(
        mark_bounded(explain_client_exclusions(mark_unreliable(metric, runs), pair), cell) for metric in compared
    )
    failures = tuple(failure for run in runs if (failure := _failure(run)))
    return CellComparison(
        label=pair.label,
        a_label=pair.a.label,
        b_label=pair.b.label,
        num_blocks=min(len(pair.a_runs), len(pair.b_runs)),
        num_a_first=None if cell.design.positions is None else sum(apart > 0 for apart in cell.design.positions),
        metrics=metrics,
        errors=tuple(_errors(cell, metrics, failures, allow_failed=allow_failed)),
        failures=failures,
    )


def _errors(
    cell: PairedRuns, metrics: Sequence[MetricComparison], failures: Sequence[str], *, allow_failed: bool
) -> Iterator[str]:
    """Why a cell cannot be judged."""
    if not cell.pair.a_runs or not cell.pair.b_runs:
        yield "no block has a usable run on both sides"
    if failures and not allow_failed:
        yield from (f"INCOMPLETE: {failure}" for failure in failures)
    elif not failures:
        for metric in metrics:
            if metric.verdict == "different":
                yield f"{metric.metric.name} must be equal and is {metric.a:.6g} against {metric.b:.6g}"
    for run, check in cell.checks():
        if check.ok is False and check.is_fatal:
            yield f"{run.record.run_id}: check {check.name} failed: {check.detail}"


def _failure(run: LoadedRun) -> str | None:
    """Which requests of a run failed, by kind; None when all were answered."""
    requests = measured(run.requests)
    failed = [request for request in requests if not is_completed(request)]
    if not failed:
        return None
    kinds = sorted({request.error.kind if request.error else "unanswered" for request in failed})
    return f"{len(failed)} of {len(requests)} requests failed in {run.record.run_id} ({', '.join(kinds)})"
