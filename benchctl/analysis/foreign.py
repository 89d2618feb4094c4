"""Result files of other tools against each other or against an arm of a directory: unpaired, load by load."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.analysis.analyzed import run_latencies
from benchctl.analysis.compare.compare import (
    CompareOptions,
    compare_sides,
    metric_errors,
)
from benchctl.analysis.compare.metric import MetricComparison, Role, Rules, compare_metric, judge_together, roles_of
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import statistical_warnings
from benchctl.analysis.experiment.experiment import Arm, Experiment, load_experiment
from benchctl.analysis.experiment.pairing import arms_of, parse_side
from benchctl.analysis.experiment.summary import RunSummary
from benchctl.analysis.metrics.latency import PERCENTS, is_completed, measured, smallest_sample
from benchctl.analysis.metrics.table import LATENCIES, METRICS, deciding_metrics
from benchctl.analysis.statistics.estimate import unpaired_ratio
from benchctl.analysis.validity.comparable import Difference, require_comparable
from benchctl.errors import NotComparableError, UsageError
from benchctl.interop.foreign_readers import ForeignRun, exists, is_foreign, read_foreign, unanswered
from benchctl.interop.foreign_values import Setting
from benchctl.profile.choices import DEFAULT_THRESHOLD
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import ResultWarning

_VIRTUAL = "the simulator's clock is virtual: its times are scaled, those of another tool are not"
_CHOICES = "requests of benchctl asked for several choices each; other tools ask for one"


def is_unpaired(a: str, b: str) -> bool:
    """True where either side is a result file of another tool."""
    return is_foreign(a) or is_foreign(b)


def runs_of_side(text: str, *, allow_suspect: bool = False) -> tuple[ForeignRun, ...]:
    """The runs of a side. Raises UsageError where a directory has several arms and none is named."""
    if is_foreign(text):
        return read_foreign(text)
    side = parse_side(text)
    experiment = load_experiment(side.path, allow_suspect=allow_suspect)
    arm, *others = arms_of(experiment, side.variant)
    if others:
        raise UsageError(
            f"{side} holds {' | '.join(each.label for each in (arm, *others))}; only one of them can be compared "
            "with result files of another tool: name it as DIR:variant, or export the directory and name the files "
            "('benchctl export')"
        )
    return tuple(_run(experiment, arm, run) for _, run in sorted(arm.runs.items()))


def name_of_side(text: str) -> str:
    """The shortest name of a side: its variant, or the last part of its path."""
    if is_foreign(text):
        paths = [Path(part) for part in ([text] if exists(Path(text)) else text.split(","))]
        return paths[0].resolve().name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"
    side = parse_side(text)
    return side.variant or side.path.resolve().name


def _run(experiment: Experiment, arm: Arm, run: LoadedRun) -> ForeignRun:
    metrics = experiment.counted_metrics(run)
    requests = measured(run.requests)
    model = run.record.effective_config.get("model")
    arrival = experiment.arrival_of(run.record) or experiment.profile.workload.arrival
    failed = sum(not is_completed(request) for request in requests)
    notes = [f"left out: {why}" for _, why in sorted(arm.excluded.items())]
    notes += [f"the client's times are left out: {why}" for _, why in sorted(arm.client_excluded.items())]
    notes += [_VIRTUAL] if run.record.clock_factor != 1 else []
    notes += [_CHOICES] if any(len(request.choices) > 1 for request in requests) else []
    return ForeignRun(
        source="benchctl",
        where=str(ResultDirectory(experiment.path).run(run.record.run_id).path),
        metrics={name: value for name, value in metrics.items() if value is not None},
        settings={
            "model_id": None if model is None else str(model),
            "num_prompts": len(requests) / len(run.loads),
            "total_input_tokens": metrics["prompt_tokens"],
            "request_rate": arrival.request_rate if arrival.is_open_loop else "inf",
            "max_concurrency": None if arrival.max_concurrency is None else float(arrival.max_concurrency),
        },
        failure=unanswered(failed, len(requests)),
        notes=tuple(notes),
        latencies_ms={name: tuple(values) for name, values in run_latencies(RunSummary(run, experiment)).items()},
    )


DECIDING: Final = ("tpot_ms", "ttft_ms", "output_throughput")
"""Default deciding metrics, as far as every run knows them."""
_COUNTED: Final = {"num_prompts": ("num_requests", "num_completed"), "total_input_tokens": ("prompt_tokens",)}
"""Exact metrics that a setting stands for: where it may differ, so may they."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """Runs of both sides under one load."""

    label: str
    a: tuple[ForeignRun, ...]
    b: tuple[ForeignRun, ...]


def compare_paths(a: str, b: str, options: CompareOptions) -> Comparison:
    """Compare block by block if both sides are result directories, run by run if one consists of result files."""
    if not is_unpaired(a, b):
        return compare_sides(parse_side(a), parse_side(b), options)
    a_runs, b_runs = (runs_of_side(side, allow_suspect=options.allow_suspect) for side in (a, b))
    names = name_of_side(a), name_of_side(b)
    return compare_foreign(a_runs, b_runs, options, names if names[0] != names[1] else (a, b))


def compare_foreign(
    a: Sequence[ForeignRun], b: Sequence[ForeignRun], options: CompareOptions, names: tuple[str, str] = ("A", "B")
) -> Comparison:
    """Compare the runs of B with those of A.

    Raises NotComparableError where undeclared settings differ or the sides share no load, UsageError for a metric
    that does not exist.
    """
    cells, unmatched = _cells(a, b)
    runs = [run for cell in cells for run in (*cell.a, *cell.b)]
    allowed = require_comparable(_differences(cells), options.allow)
    metrics = options.metrics or tuple(name for name in DECIDING if all(name in run.metrics for run in runs))
    if not metrics:
        in_all = sorted(set.intersection(*(set(run.metrics) for run in runs)))
        raise NotComparableError(
            f"the runs do not all have {' or '.join(DECIDING)}; metrics in all of them: "
            f"{', '.join(in_all) or 'none'}. Name the deciding metrics with --metrics"
        )
    deciding = deciding_metrics(metrics)
    rules = Rules(
        margin_frac=DEFAULT_THRESHOLD if options.margin_frac is None else options.margin_frac,
        confidence=options.confidence,
        is_paired=False,
        noise=options.noise or {},
        equivalence_margin_frac=options.equivalence_margin_frac,
    )
    roles = _roles(deciding, allowed, runs)
    judged = judge_together([_compare_metrics(cell, roles, rules) for cell in cells], rules.confidence)
    compared = [
        _compared_cell(cell, names, metrics, allow_failed=options.allow_failed)
        for cell, metrics in zip(cells, judged, strict=True)
    ]
    return Comparison(
        a_name=names[0],
        b_name=names[1],
        pairing="unpaired",
        rules=rules,
        cells=tuple(compared),
        allowed=allowed,
        warnings=(*_warnings(cells, unmatched), *statistical_warnings(compared)),
    )


def _cells(a: Sequence[ForeignRun], b: Sequence[ForeignRun]) -> tuple[list[_Cell], list[str]]:
    """Cells of equal load, and the loads that only one side has.

    Two sides of one load each are one cell even where the loads differ: that is a difference of settings.
    """
    left, right = _by_load(a), _by_load(b)
    if len(left) == len(right) == 1:
        return [_Cell(next(iter(right)), tuple(a), tuple(b))], []
    shared = [label for label in right if label in left]
    if not shared:
        sides = " against ".join(" | ".join(side) or "none" for side in (left, right))
        raise NotComparableError(
            f"no load was driven on both sides: {sides}. Name files of the same request rate and concurrency"
        )
    lone = [label for label in (*left, *right) if label not in shared]
    return [_Cell(label, tuple(left[label]), tuple(right[label])) for label in shared], lone


def _by_load(runs: Sequence[ForeignRun]) -> dict[str, list[ForeignRun]]:
    runs_by_load: dict[str, list[ForeignRun]] = {}
    for run in runs:
        limits = [f"{key}={_format_setting(value)}" for key, value in run.load_point if value not in (None, "inf")]
        runs_by_load.setdefault(" ".join(limits) or "unlimited load", []).append(run)
    return runs_by_load


def _differences(cells: Sequence[_Cell]) -> tuple[Difference, ...]:
    """Settings known on both sides with more than one value, including those that change within a side."""
    cells_of: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for key in _settings(cell):
            left, right = _values(cell.a, key), _values(cell.b, key)
            if left and right and len({*left, *right}) > 1:
                cells_of.setdefault((key, " or ".join(left), " or ".join(right)), []).append(cell.label)
    return tuple(
        Difference(key, left, right, () if len(labels) == len(cells) else tuple(labels))
        for (key, left, right), labels in sorted(cells_of.items())
    )


def _settings(cell: _Cell) -> list[str]:
    """Settings to compare; not the number of prompt tokens where two tools count them, each in its own way."""
    keys = {key for run in (*cell.a, *cell.b) for key in run.settings}
    tools = {run.source for run in (*cell.a, *cell.b)}
    return sorted(keys - {"total_input_tokens"} if len(tools) > 1 else keys)


def _values(runs: Iterable[ForeignRun], key: str) -> tuple[str, ...]:
    settings = (run.settings.get(key) for run in runs)
    return tuple(dict.fromkeys(_format_setting(value) for value in settings if value is not None))


def _format_setting(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _roles(deciding: Sequence[str], allowed: Sequence[Difference], runs: Sequence[ForeignRun]) -> dict[str, Role]:
    """Counts must be equal, except where the setting behind them may differ or a run lacks them."""
    roles = roles_of(deciding, is_forced=False)
    free = {name for difference in allowed for name in _COUNTED.get(difference.key, ())}
    free |= {"prompt_tokens"} if len({run.source for run in runs}) > 1 else set()
    free |= {name for name in roles if METRICS[name].is_exact and any(name not in run.metrics for run in runs)}
    return {name: "exploratory" if role == "exact" and name in free else role for name, role in roles.items()}


def _compare_metrics(cell: _Cell, roles: Mapping[str, Role], rules: Rules) -> list[MetricComparison]:
    """Every metric under one load that a run of either side knows."""
    a_metrics, b_metrics = [_metrics(run) for run in cell.a], [_metrics(run) for run in cell.b]
    compared = []
    for name, role in roles.items():
        a, b = tuple(each[name] for each in a_metrics), tuple(each[name] for each in b_metrics)
        metric = compare_metric(name, role, (a, b), rules, unpaired_ratio(a, b, rules.confidence))
        compared += [] if metric is None else [metric]
    return compared


def _compared_cell(
    cell: _Cell, names: tuple[str, str], metrics: tuple[MetricComparison, ...], *, allow_failed: bool
) -> CellComparison:
    """The comparison of both sides under one load."""
    failures = tuple(f"{run.where}: {run.failure}" for run in (*cell.a, *cell.b) if run.failure is not None)
    return CellComparison(
        label=cell.label,
        a_label=names[0],
        b_label=names[1],
        num_blocks=min(len(cell.a), len(cell.b)),
        metrics=metrics,
        errors=tuple(metric_errors(metrics, failures, allow_failed=allow_failed)),
        failures=failures,
    )


def _metrics(run: ForeignRun) -> dict[str, float | None]:
    """Every metric by name; percentiles that too few requests support are None even where the tool reports them."""
    metrics: dict[str, float | None] = dict.fromkeys(METRICS) | dict(run.metrics)
    num_completed = run.metrics.get("num_completed", 0)
    for percent in PERCENTS:
        if num_completed < smallest_sample(percent):
            metrics |= dict.fromkeys((f"p{percent}_{latency}_ms" for latency in LATENCIES), None)
    return metrics


def _warnings(cells: Sequence[_Cell], unmatched: Sequence[str]) -> list[ResultWarning]:
    runs = [run for cell in cells for run in (*cell.a, *cell.b)]
    sources = sorted({run.source for run in runs})
    warnings = [
        ResultWarning(
            code="foreign-results",
            message="result files record neither the order of the runs nor the server's configuration nor the "
            "machine: nothing proves that only the intended change lies between the sides",
        )
    ]
    if len(sources) > 1:
        message = (
            f"the runs were measured by different tools ({', '.join(sources)}), which start and stop their clocks "
            "at different points and count prompt tokens differently: a part of any difference may be theirs, and "
            "nothing shows that the prompts were the same"
        )
        warnings.append(ResultWarning(code="tools-differ", message=message))
    one_sided = {
        key for cell in cells for key in _settings(cell) if bool(_values(cell.a, key)) != bool(_values(cell.b, key))
    }
    if one_sided:
        message = f"not on file for both sides, and so not compared: {', '.join(sorted(one_sided))}"
        warnings.append(ResultWarning(code="settings-unknown", message=message))
    warnings += [ResultWarning(code="load-unmatched", message=f"only one side has {label}") for label in unmatched]
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return warnings + [ResultWarning(code="definition", message=note) for note in notes]
