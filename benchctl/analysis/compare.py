"""The verdict: two sides, matched cell by cell and block by block, judged against a margin.

    sides ▸ load ▸ match cells ▸ require comparable ▸ metrics and checks of each run ▸ estimates ▸ verdict

A pure function of the directories: no clock, no randomness, and the same numbers on every machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchctl.analysis.answers import AnswerOptions, with_answers
from benchctl.analysis.comparability import (
    configuration_differences,
    experiment_differences,
    require_comparable,
)
from benchctl.analysis.comparison import CellComparison, Comparison
from benchctl.analysis.decomposition_cells import with_decompositions
from benchctl.analysis.distrust import without_distrusted
from benchctl.analysis.doubts import counted_suspects, measurement_doubts, statistical_doubts
from benchctl.analysis.margins import decision_alpha
from benchctl.analysis.metric_comparison import (
    UNORDERED,
    BlockDesign,
    MetricComparison,
    Role,
    Rules,
    compare_metrics,
    judged,
    roles_of,
)
from benchctl.analysis.metrics import METRICS, run_metrics
from benchctl.analysis.multiplicity import BlockScores, holm_levels, joint_levels
from benchctl.analysis.pairing import CellPair, Side, match_cells, parse_side
from benchctl.analysis.reconcile import Check, expectation_of, profile_of, reconcile
from benchctl.analysis.request_timing import is_completed, measured
from benchctl.analysis.statistics import Estimator
from benchctl.analysis.stopping import num_looks_of
from benchctl.errors import UsageError
from benchctl.profile.locate import nearest
from benchctl.profile.model import Profile
from benchctl.records.directory import LoadedResults, LoadedRun, load_results
from benchctl.records.noise import MetricNoise, load_noise

__all__ = ["CompareOptions", "Side", "compare_results", "compare_sides", "parse_side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How to compare. ``metrics`` replaces the profile's primary metrics; ``allow`` adds allowed differences.

    ``allow_failed`` judges what completed although requests failed, ``allow_suspect`` counts suspect runs.
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


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What one run says: its metrics, and whether its records agree."""

    run: LoadedRun
    metrics: Mapping[str, float | None]
    checks: tuple[Check, ...]


_Account = dict[int, _Evidence]
"""Evidence by the identity of the loaded run: a baseline run serves many cells and is read once."""


def compare_sides(a_side: Side, b_side: Side, options: CompareOptions) -> Comparison:
    """Compare B with A.

    Raises NotComparableError when they differ in more than what was declared, RecordError when results are
    damaged, UsageError for a variant or metric that does not exist.
    """
    a = load_results(a_side.path)
    b = a if b_side.path.resolve() == a_side.path.resolve() else load_results(b_side.path)
    return compare_results((a, a_side), (b, b_side), options)


def compare_results(
    a_given: tuple[LoadedResults, Side], b_given: tuple[LoadedResults, Side], options: CompareOptions
) -> Comparison:
    """``compare_sides`` of directories that were loaded; ``a_given[0] is b_given[0]`` where they are one."""
    (a, a_side), (b, b_side) = a_given, b_given
    a_profile, b_profile = profile_of(a), profile_of(b)
    deciding = deciding_metrics(options.metrics or a_profile.primary_metrics)
    pairs = match_cells(a, a_side, b, b_side, allow_suspect=options.allow_suspect)
    differences = (
        *experiment_differences(a.manifest, b.manifest),
        *configuration_differences(
            {pair.label: (pair.a_runs, pair.b_runs) for pair in pairs},
            has_one_host=a.manifest.host.hostname == b.manifest.host.hostname,
        ),
    )
    shared = tuple(p for p in a_profile.allowed_differences if p in b_profile.allowed_differences)
    allowed = require_comparable(differences, (*shared, *options.allow))
    account = _account(a, a_profile, [run for pair in pairs for run in pair.a_runs])
    account |= _account(b, b_profile, [run for pair in pairs for run in pair.b_runs])
    num_looks = num_looks_of(a.manifest, b.manifest)
    confidence = 1 - (1 - options.confidence) / num_looks
    rules = Rules(
        margin_frac=options.margin_frac,
        confidence=confidence,
        is_paired=pairs[0].pairing != "unpaired",
        noise=noise_of(a, b) if options.noise is None else options.noise,
        equivalence_margin_frac=options.equivalence_margin_frac,
        estimator=options.estimator or a_profile.comparison.estimator,
    )
    roles = roles_of(deciding, is_forced=a.manifest.stop != "natural")
    found = [_compare_cell(pair, account, roles, rules, allow_failed=options.allow_failed) for pair in pairs]
    answers = AnswerOptions(judge=options.judge, margin_points=options.quality_margin_points, confidence=confidence)
    answered = with_answers(corrected(found, confidence), pairs, (a, b), answers)
    designs = [(pair, _design_of(pair)) for pair in pairs]
    metrics_of = {key: evidence.metrics for key, evidence in account.items()}
    cells = with_decompositions(answered, designs, (a, b), metrics_of, confidence)
    checks = [(evidence.run, check) for evidence in account.values() for check in evidence.checks]
    a_name, b_name = side_names(a_side, b_side)
    counted = counted_suspects(pairs, (a_name, b_name)) if options.allow_suspect else ()
    return Comparison(
        a_name=a_name,
        b_name=b_name,
        pairing=pairs[0].pairing,
        margin_frac=options.margin_frac,
        equivalence_margin_frac=options.equivalence_margin_frac,
        confidence=confidence,
        num_looks=num_looks,
        cells=cells,
        allowed=allowed,
        warnings=(*counted, *measurement_doubts(a, b, pairs, checks), *statistical_doubts(cells)),
        noise={name: noise for name, noise in rules.noise.items() if name in deciding},
    )


def noise_of(a: LoadedResults, b: LoadedResults) -> dict[str, MetricNoise]:
    """The noise that lies in the directories; of two, the larger floor of each metric."""
    found: dict[str, MetricNoise] = {}
    for results in (a,) if a is b else (a, b):
        floor = load_noise(results.path)
        for name, noise in floor.metrics.items() if floor is not None else ():
            if name not in found or noise.floor_frac > found[name].floor_frac:
                found[name] = noise
    return found


def corrected(cells: Sequence[CellComparison], confidence: float) -> tuple[CellComparison, ...]:
    """With the deciding verdicts of all cells made together: the chance of any wrong one is 1 - confidence."""
    tests = [(c, i, m) for c, cell in enumerate(cells) for i, m in enumerate(cell.metrics) if _is_tested(m)]
    metrics = [list(cell.metrics) for cell in cells]
    levels = _levels([metric for _, _, metric in tests], 1 - confidence)
    for (c, i, metric), level in zip(tests, levels, strict=True):
        metrics[c][i] = judged(metric, 1 - level)
    return tuple(replace(cell, metrics=tuple(m)) for cell, m in zip(cells, metrics, strict=True))


def _levels(metrics: Sequence[MetricComparison], alpha: float) -> tuple[float, ...]:
    """The alpha at which each is judged: together where the sides share blocks, by Holm where not."""
    scored = [(i, found) for i, metric in enumerate(metrics) if (found := _scores(metric)) is not None]
    if scored:

        def decides(index: int, level: float) -> bool:
            return judged(metrics[scored[index][0]], 1 - level).verdict != "inconclusive"

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
    return metric.role == "deciding" and metric.estimate is not None and not metric.is_distrusted


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


def _account(results: LoadedResults, profile: Profile, runs: Sequence[LoadedRun]) -> _Account:
    return {
        id(run): _Evidence(run, run_metrics(run), reconcile(run, expectation_of(profile, results, run.record)))
        for run in {id(run): run for run in runs}.values()
    }


def _compare_cell(
    pair: CellPair, account: _Account, roles: Mapping[str, Role], rules: Rules, *, allow_failed: bool
) -> CellComparison:
    a, b = [account[id(run)] for run in pair.a_runs], [account[id(run)] for run in pair.b_runs]
    a_metrics, b_metrics = [evidence.metrics for evidence in a], [evidence.metrics for evidence in b]
    runs = [evidence.run for evidence in (*a, *b)]
    found = compare_metrics(a_metrics, b_metrics, roles, rules, _design_of(pair))
    metrics = tuple(without_distrusted(compared, runs) for compared in found)
    faults = [] if a and b else ["no block has a usable run on both sides"]
    failures = [failure for evidence in (*a, *b) if (failure := _failure(evidence.run))]
    if failures and not allow_failed:
        faults += [f"INCOMPLETE: {failure}" for failure in failures]
    elif not failures:
        faults += [
            f"{m.metric.name} must be equal and is {m.a:.6g} against {m.b:.6g}"
            for m in metrics
            if m.verdict == "different"
        ]
    faults += [
        f"{evidence.run.record.run_id}: check {check.name} failed: {check.detail}"
        for evidence in (*a, *b)
        for check in evidence.checks
        if check.ok is False and check.is_fatal
    ]
    is_ordered = pair.pairing == "interleaved" and pair.a.key != pair.b.key
    return CellComparison(
        label=pair.label,
        a_label=pair.a.label,
        b_label=pair.b.label,
        num_blocks=min(len(a), len(b)),
        num_a_first=sum(_ran_before(x, y) for x, y in zip(a, b, strict=True)) if is_ordered else None,
        metrics=metrics,
        faults=tuple(faults),
        failures=tuple(failures),
    )


def _design_of(pair: CellPair) -> BlockDesign:
    """Blocks of a pair; places only where both sides ran inside the same blocks."""
    if pair.pairing == "unpaired":
        return UNORDERED
    places = None
    if pair.pairing == "interleaved" and pair.a.key != pair.b.key:
        runs = zip(pair.a_runs, pair.b_runs, strict=True)
        places = tuple(b.record.position - a.record.position for a, b in runs)
    return BlockDesign(pair.blocks, places)


def _failure(run: LoadedRun) -> str | None:
    """Which requests of a run failed, by kind; None when all were answered."""
    requests = measured(run.requests)
    failed = [request for request in requests if not is_completed(request)]
    if not failed:
        return None
    kinds = sorted({request.error.kind if request.error else "unanswered" for request in failed})
    return f"{len(failed)} of {len(requests)} requests failed in {run.record.run_id} ({', '.join(kinds)})"


def _ran_before(x: _Evidence, y: _Evidence) -> bool:
    return x.run.record.position < y.run.record.position
