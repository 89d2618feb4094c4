"""The comparison of two sides: cells matched, their metrics compared, all deciding tests corrected together."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchctl.analysis.compare.capacity import capacity_cell, compare_capacity, compared_capacities
from benchctl.analysis.compare.cells import compare_answers, decompose_pair, node_sentence, results_by_node
from benchctl.analysis.compare.judge import judge_named
from benchctl.analysis.compare.metric import MetricComparison, Rules, compare_metric, judge_together, roles_of
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import (
    measurement_warnings,
    statistical_warnings,
    suspect_warnings,
)
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.experiment.looks import looked_confidence, num_extensions_of, num_looks_of
from benchctl.analysis.experiment.observed import explaining_model
from benchctl.analysis.experiment.pairing import (
    ArmPair,
    Side,
    deciding_between,
    match_cells,
    undecided,
)
from benchctl.analysis.metrics.arrivals import num_bunched
from benchctl.analysis.metrics.latency import is_completed, measured
from benchctl.analysis.metrics.run import arm_drafts, other_cores
from benchctl.analysis.metrics.table import ACROSS_LOADS, CLIENT_TIMED, OF_SLO, STEADY, deciding_metrics
from benchctl.analysis.statistics.estimate import Estimator
from benchctl.analysis.validity.comparable import (
    Difference,
    declared_settings,
    experiment_differences,
    hardware_differences,
    refused_differences,
    require_comparable,
    setting_differences,
)
from benchctl.analysis.validity.machines import gpu_names_text, machines_of, other_machine_warning
from benchctl.analysis.validity.usable import require_intact
from benchctl.errors import UsageError
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.objective import Slo
from benchctl.records.schema import ResultWarning
from benchctl.records.stores import NOISE, MetricNoise
from benchctl.records.warning_codes import by_severity
from benchctl.untrusted.files import is_there
from benchctl.untrusted.text import visible_line


def _limits_of(name: str, pair: ArmPair) -> dict[str, Any]:
    """The reasons why values of a metric do not count, or decide nothing."""
    num_runs, limits = len(pair.runs), []
    missing = [sum(value is None for value in side) for side in pair.values(name)]
    if name in STEADY.values() and any(missing) and missing != [len(pair.a_runs), len(pair.b_runs)]:
        limits.append(
            f"{missing[0]} of {len(pair.a_runs)} runs of {pair.a.label} and {missing[1]} of {len(pair.b_runs)} of "
            f"{pair.b.label} have no steady window for it, and one side alone cannot be compared"
        )
    num_excluded = len(pair.a.client_excluded) + len(pair.b.client_excluded)
    if num_excluded and name in CLIENT_TIMED:
        limits.append(
            f"the client's times of {num_excluded} of {len(pair.a.runs) + len(pair.b.runs)} runs do not count; "
            "metrics that the server measured do (step_ms), and --allow-suspect counts all"
        )
    unreliable = None
    if number := num_bunched(name, pair.runs):
        unreliable = (
            f"tokens reached the client in bursts in {number} of {num_runs} runs, so it decides nothing; free "
            "processors and measure again, or let other metrics decide (--metrics)"
        )
    if name in OF_SLO and not any(value for side in pair.values(name) for value in side):
        unreliable = "no request of any run keeps all limits of slo, so it tells nothing; raise them"
    return {"limits": tuple(limits), "unreliable": unreliable}


def metric_errors(
    metrics: Sequence[MetricComparison], failures: Sequence[str], *, allow_failed: bool
) -> Iterator[str]:
    """Failed requests, unless they are allowed; without any, the exact metrics whose sides differ."""
    if failures and not allow_failed:
        yield from (f"INCOMPLETE: {failure}" for failure in failures)
    elif not failures:
        for metric in metrics:
            if metric.verdict == "different":
                yield f"{metric.metric.name} must be equal and is {metric.a:.6g} against {metric.b:.6g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of a comparison. Raises UsageError for a value out of range."""

    margin_frac: float | None = None
    """The threshold: a smaller change does not count. None: that of the profile."""
    equivalence_margin_frac: float | None = None
    """Inside it two sides are called equivalent; None: inside the threshold."""
    confidence: float = 0.95
    estimator: Estimator | None = None
    """None: that of the profile."""
    metrics: tuple[str, ...] = ()
    """Deciding metrics; none: the primary metrics of the profile that both sides record."""
    allow: tuple[str, ...] = ()
    """Differences that are allowed beside those that both profiles allow."""
    allow_failed: bool = False
    """Judge the completed requests although others failed."""
    allow_suspect: bool = False
    """Count suspect runs."""
    allow_altered: bool = False
    """Judge files that were altered after they were measured."""
    noise: Mapping[str, MetricNoise] | None = None
    """Noise floors by metric; None: those on file in the directories, ``{}``: none."""
    noise_source: str = ""
    """The A/A experiment of ``noise``."""
    judge: str | None = None
    """Name of the judge of answers; None: ``json`` where requests ask for JSON without gold answers, else
    ``numeric``."""
    quality_margin_points: float | None = None
    """Margin with which quality decides as well; None: quality is reported and decides nothing."""
    step_time_model: Path | None = None
    """Model that explains the change of the mean step; None: the profile's, where it names one."""

    def __post_init__(self) -> None:
        margin, equivalence, confidence = self.margin_frac, self.equivalence_margin_frac, self.confidence
        if margin is not None and not 0 <= margin < 1:
            raise UsageError(f"the threshold is {margin:.3g}; it is a fraction from 0 to below 1: 0.01 or 1%")
        if equivalence is not None and not 0 < equivalence < 1:
            message = "it is a fraction above 0 and below 1: 0.02 or 2%"
            raise UsageError(f"the equivalence margin is {equivalence:.3g}; {message}")
        if not 0.5 <= confidence < 1:
            raise UsageError(
                f"the confidence is {confidence:.3g}; it must be from 0.5 to below 1, for example 0.95"
            )
        if self.judge is not None:
            judge_named(self.judge)
        points = self.quality_margin_points
        if points is not None and not 0 <= points < 100:
            raise UsageError(
                f"the quality margin is {points:g}; it must be a number of percentage points from 0 to below 100, "
                "for example --quality-margin 1"
            )


def compare_sides(a_side: Side, b_side: Side, options: CompareOptions) -> Comparison:
    """Load two sides and compare B with A.

    Raises NotComparableError where they differ in more than the declared factor, AlteredError where files were
    altered after they were measured, RecordError where results are damaged, UsageError for a variant or metric that
    does not exist.
    """
    return compare_experiments(*load_sides(a_side, b_side, options), options)


def load_sides(
    a_side: Side, b_side: Side, options: CompareOptions
) -> tuple[tuple[Experiment, Side], tuple[Experiment, Side]]:
    """The experiments of two sides, that of one directory once."""
    a = load_experiment(a_side.path, allow_suspect=options.allow_suspect)
    is_one = b_side.path.resolve() == a_side.path.resolve()
    b = a if is_one else load_experiment(b_side.path, allow_suspect=options.allow_suspect)
    return (a, a_side), (b, b_side)


def compare_experiments(
    reference: tuple[Experiment, Side], other: tuple[Experiment, Side], options: CompareOptions
) -> Comparison:
    """Compare loaded sides, as ``compare_sides`` does; one directory is one and the same ``Experiment``.

    Suspect runs count where the experiment was loaded with ``allow_suspect``.
    """
    (a, a_side), (b, b_side) = reference, other
    named = deciding_metrics(options.metrics or a.profile.primary_metrics)
    confidence = looked_confidence(a.results, b.results, options.confidence)
    pairs = match_cells(a, a_side, b, b_side, confidence, options.estimator)
    altered, allowed = _require_comparable((a, b), pairs, options)
    rules, misfits = _rules_of(pairs[0], options)
    model = explaining_model((a, b), options.step_time_model)
    answers = compare_answers((a, b), pairs, options.judge, options.quality_margin_points)
    across = [name for name in named if name in ACROSS_LOADS]
    of_run = [name for name in named if name not in ACROSS_LOADS]
    deciding_in = [of_run if options.metrics else deciding_between(of_run, pair) for pair in pairs]
    compared = [_compare_metrics(pair, deciding, rules) for pair, deciding in zip(pairs, deciding_in, strict=True)]
    capacities = [capacity for name in across for capacity in compared_capacities(pairs, name)]
    of_capacities = [[compare_capacity(capacity, rules)] for capacity in capacities]
    judged = judge_together([*compared, *of_capacities], confidence)
    cells = [
        _cell(
            pair,
            metrics,
            allow_failed=options.allow_failed,
            unrecorded=undecided(of_run, deciding),
            decomposition=decompose_pair(pair, model),
            **answers_of_cell,
        )
        for pair, deciding, metrics, answers_of_cell in zip(
            pairs, deciding_in, judged[: len(pairs)], answers, strict=True
        )
    ]
    nodes = results_by_node(
        (pair, [metric.metric.name for metric in cell.deciding]) for pair, cell in zip(pairs, cells, strict=True)
    )
    if capacities:  # a load decides only by metrics of its own
        of_pairs = dict(zip(pairs, cells, strict=True))
        cells = [
            *(capacity_cell(each, m, of_pairs) for each, m in zip(capacities, judged[len(pairs) :], strict=True)),
            *(cell for cell in cells if cell.deciding or cell.is_quality_deciding),
        ]
    sentence, names = None if nodes is None else node_sentence(nodes), side_names(a_side, b_side)
    return Comparison(
        a_name=names[0],
        b_name=names[1],
        pairing=pairs[0].pairing,
        rules=rules,
        cells=tuple(cells),
        num_looks=num_looks_of(a.results.manifest, b.results.manifest),
        num_extensions=num_extensions_of(a.results.manifest, b.results.manifest),
        allowed=allowed,
        warnings=by_severity(
            [
                *altered,
                *(suspect_warnings(pairs, names) if a.allow_suspect or b.allow_suspect else ()),
                *misfits,
                *measurement_warnings(a.results, b.results, pairs),
                *statistical_warnings(cells),
                *(() if sentence is None else (ResultWarning(code="node-differs", message=sentence),)),
            ]
        ),
        nodes=nodes,
        is_simulated=any(is_virtual(side.results.manifest.engine) for side in (a, b)),
        measured_on=_measured_on(pairs),
        other_cores=other_cores((run for pair in pairs for run in pair.a_runs), a.results.manifest.host),
    )


def _measured_on(pairs: Sequence[ArmPair]) -> str:
    """``vllm, Qwen/Qwen3-4B, 1 x NVIDIA H100``; what both sides have in common stands once."""
    engines, models, devices = dict[str, None](), dict[str, None](), dict[str, None]()
    for side, arm in chain.from_iterable(zip(pair.sides, (pair.a, pair.b), strict=True) for pair in pairs):
        settings, hardware, machines = side.settings(arm), side.hardware_of(arm), machines_of(side.results)
        engine = side.results.manifest.engine
        device = gpu_names_text(gpu for machine in machines for gpu in machine.gpus)
        device = device or f"{machines[0].cpu_model or machines[0].node}, no GPU"
        if is_virtual(engine):
            device = f"a simulated {'device' if hardware is None else hardware.name}; no GPU was measured"
        engines[engine] = devices[device] = None
        if settings is not None and settings.model != "unknown":
            models[str(settings.model)] = None
    return ", ".join(" and ".join(names) for names in (engines, models, devices) if names)


def _rules_of(pair: ArmPair, options: CompareOptions) -> tuple[Rules, tuple[ResultWarning, ...]]:
    """The rules of a comparison of which ``pair`` is one, and a warning for each noise of another machine."""
    noise, noise_source, misfits = (
        noise_of(*pair.sides) if options.noise is None else (options.noise, options.noise_source, ())
    )
    rules = Rules(
        margin_frac=pair.sides[0].margin_frac if options.margin_frac is None else options.margin_frac,
        confidence=pair.confidence,
        is_paired=pair.pairing != "unpaired",
        noise=noise,
        noise_source=noise_source,
        equivalence_margin_frac=options.equivalence_margin_frac,
    )
    return rules, misfits


def _compare_metrics(pair: ArmPair, deciding: Sequence[str], rules: Rules) -> list[MetricComparison]:
    """Every metric of two arms that either knows."""
    compared = []
    for name, role in roles_of(deciding, is_forced=pair.sides[0].results.manifest.stop != "natural").items():
        ratio = None if role == "exact" else pair.ratio(name)
        metric = compare_metric(name, role, pair.values(name), rules, ratio, **_limits_of(name, pair))
        compared += [] if metric is None else [metric]
    return compared


def _cell(
    pair: ArmPair, metrics: tuple[MetricComparison, ...], *, allow_failed: bool, **parts: Any
) -> CellComparison:
    """The comparison of two arms; ``parts`` are those that it does not take from ``pair``."""
    failures = _failures_of(pair)
    return CellComparison(
        label=pair.label,
        a_label=pair.a.label,
        b_label=pair.b.label,
        num_blocks=min(len(pair.a_runs), len(pair.b_runs)),
        metrics=metrics,
        failures=failures,
        errors=tuple(_errors_of(pair, metrics, failures, allow_failed=allow_failed)),
        a_drafts=arm_drafts(pair.a_runs),
        b_drafts=arm_drafts(pair.b_runs),
        design=pair.design,
        **parts,
    )


def _failures_of(pair: ArmPair) -> tuple[str, ...]:
    """Number and kinds of failed requests, for each run that has some.

    Those of loads that are left out count, unless a gate of a profile leaves out what has failed requests.
    """
    failures, are_gated = list[str](), any("failed-requests" in side.profile.gates for side in pair.sides)
    for run in pair.runs:
        counting = {load.load for load in run.loads}
        for load in () if are_gated else run.record.loads:
            if load.state == "suspect" and load.num_failed and load.number not in counting:
                sent = f"{load.num_failed} of {load.num_sent} requests failed in load {load.number}"
                failures.append(f"{sent} of {run.record.run_id}, which is left out")
        requests = measured(run.requests)
        failed = [request for request in requests if not is_completed(request)]
        if failed:
            counts = Counter(request.error.kind if request.error else "unanswered" for request in failed)
            kinds = (f"{count} {kind}" if len(counts) > 1 else kind for kind, count in sorted(counts.items()))
            failures.append(
                f"{len(failed)} of {len(requests)} requests failed in {run.record.run_id} ({', '.join(kinds)})"
            )
    return tuple(failures)


def _errors_of(
    pair: ArmPair, metrics: Sequence[MetricComparison], failures: Sequence[str], *, allow_failed: bool
) -> Iterator[str]:
    """The reasons why a comparison of two arms is invalid."""
    if not pair.a_runs or not pair.b_runs:
        yield "no block has a usable run on both sides"
    yield from metric_errors(metrics, failures, allow_failed=allow_failed)
    for run, check in pair.checks():
        if check.ok is False and check.is_fatal:
            yield f"{run.record.run_id}: check {check.name} failed: {check.detail}"


def _objective_differences(a: Slo | None, b: Slo | None) -> Iterator[Difference]:
    """The objectives of two experiments, where both have one and they are not the same."""
    if a is not None and b is not None and a != b:
        yield Difference("slo", a.model_dump_json(exclude_none=True), b.model_dump_json(exclude_none=True))


def _require_comparable(
    sides: tuple[Experiment, Experiment], pairs: Sequence[ArmPair], options: CompareOptions
) -> tuple[tuple[ResultWarning, ...], tuple[Difference, ...]]:
    """Warnings and differences that are allowed. Raises AlteredError or NotComparableError for other ones."""
    a, b = sides
    manifests = a.results.manifest, b.results.manifest
    hosts = {manifest.host.hostname for manifest in manifests}
    has_one_experiment = manifests[0] == manifests[1]
    runs_of_cells = {pair.label: (pair.a_runs, pair.b_runs) for pair in pairs}
    declared = {pair.label: _declared_between(pair) for pair in pairs}
    differences = (
        *experiment_differences(a.results, b.results),
        *_objective_differences(a.profile.slo, b.profile.slo),
        *setting_differences(
            runs_of_cells,
            declared,
            hostname=hosts.pop() if len(hosts) == 1 else None,
            has_one_experiment=has_one_experiment,
        ),
        *hardware_differences(runs_of_cells, has_one_experiment=has_one_experiment),
    )
    shared = tuple(p for p in a.profile.allowed_differences if p in b.profile.allowed_differences)
    patterns = (*shared, *options.allow)
    refused = refused_differences(differences, patterns)
    experiments = [a] if a.path.resolve() == b.path.resolve() else [a, b]
    verified = {
        one.path: one.verified for one in experiments if is_there(one.path / "manifest.json", within=one.path)
    }
    altered = require_intact(verified, refused, allow_altered=options.allow_altered)
    return altered, require_comparable(differences, patterns)


def _declared_between(pair: ArmPair) -> frozenset[str]:
    """Patterns of the settings in which both profiles say that the two arms differ."""
    of_profiles = []
    for experiment in pair.sides:
        a, b = experiment.settings(pair.a), experiment.settings(pair.b)
        kind = experiment.results.manifest.engine
        of_profiles.append(frozenset() if a is None or b is None else declared_settings(a, b, kind))
    return of_profiles[0] & of_profiles[1]


def noise_of(a: Experiment, b: Experiment) -> tuple[dict[str, MetricNoise], str, tuple[ResultWarning, ...]]:
    """The noise on file in the directories; of two, the larger floor of each metric. With its files and the A/A
    experiments that measured it, and a warning for each noise that is left out because its machine measured no run.
    """
    held = [(one, floor) for one in dict.fromkeys((a, b)) if (floor := NOISE.in_results(one.path)) is not None]
    misfits = [other_machine_warning(floor, experiment.results) for experiment, floor in held]
    fitting = [pair for pair, misfit in zip(held, misfits, strict=True) if misfit is None]
    noise_by_metric: dict[str, MetricNoise] = {}
    for name, noise in chain.from_iterable(floor.metrics.items() for _, floor in fitting):
        noise_by_metric[name] = max(noise_by_metric.get(name, noise), noise, key=lambda each: each.floor_frac)
    sources = (f"{one.path / NOISE.file}, measured in {of.source} on {of.host}" for one, of in fitting)
    return noise_by_metric, visible_line("; ".join(sources)), tuple(filter(None, misfits))


def side_names(a: Side, b: Side) -> tuple[str, str]:
    """The shortest names that tell the two sides apart."""
    if a.variant and b.variant and a.variant != b.variant:
        return a.variant, b.variant
    first, second = (
        side.path.parent.name if side.path.name == "latest" else side.path.resolve().name for side in (a, b)
    )
    return (first, second) if first != second else (str(a), str(b))
