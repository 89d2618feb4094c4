"""The verdict over result files: two sides of runs that share no blocks, compared unpaired, load by load.

    runs ▸ cells of equal load ▸ require comparable ▸ metrics known to both ▸ estimates ▸ verdict

A result file does not tell in which order runs were made, how the server was configured, and on which machine: what
a result directory proves here stays the word of whoever measured, and a warning says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.compare.compare import CompareOptions, correct_for_multiple_tests, deciding_metrics
from benchctl.analysis.compare.metric_comparison import Role, Rules, compare_metrics, roles_of
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.warnings import statistical_warnings
from benchctl.analysis.metrics.percentile import PERCENTS, smallest_sample
from benchctl.analysis.metrics.table import LATENCIES, METRICS
from benchctl.analysis.validity.comparability import Difference, require_comparable
from benchctl.errors import NotComparableError
from benchctl.interop.readers.run import ForeignRun, Setting
from benchctl.records.run import ResultWarning

DECIDING: Final = ("tpot_ms", "ttft_ms", "output_throughput")
"""Metrics that decide where nobody names others, as far as every run knows them."""
_COUNTED: Final = {"num_prompts": ("num_requests", "num_completed"), "total_input_tokens": ("prompt_tokens",)}
"""Exact metrics that a setting stands for: where it may differ, so may they."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """Runs of both sides under one load."""

    label: str
    a: tuple[ForeignRun, ...]
    b: tuple[ForeignRun, ...]


def compare_foreign(
    a: Sequence[ForeignRun], b: Sequence[ForeignRun], options: CompareOptions, names: tuple[str, str] = ("A", "B")
) -> Comparison:
    """Compare the runs of B with those of A.

    Raises NotComparableError where settings on file differ that nobody declared, or no load is on both sides;
    UsageError for a metric that does not exist.
    """
    cells, unmatched = _cells(a, b)
    runs = [run for cell in cells for run in (*cell.a, *cell.b)]
    differences = _differences(cells)
    allowed = require_comparable(differences, options.allow)
    deciding = deciding_metrics(options.metrics or _known_to_all(runs))
    rules = Rules(
        margin_frac=options.margin_frac,
        confidence=options.confidence,
        is_paired=False,
        noise=options.noise or {},
        equivalence_margin_frac=options.equivalence_margin_frac,
    )
    roles = _roles(deciding, allowed, runs)
    found = [_compare_cell(cell, names, roles, rules, allow_failed=options.allow_failed) for cell in cells]
    compared = correct_for_multiple_tests(found, options.confidence)
    return Comparison(
        a_name=names[0],
        b_name=names[1],
        pairing="unpaired",
        margin_frac=options.margin_frac,
        equivalence_margin_frac=options.equivalence_margin_frac,
        confidence=options.confidence,
        cells=compared,
        allowed=allowed,
        warnings=(*_doubts(cells, unmatched), *statistical_warnings(compared)),
        noise={name: noise for name, noise in rules.noise.items() if name in deciding},
    )


def _cells(a: Sequence[ForeignRun], b: Sequence[ForeignRun]) -> tuple[list[_Cell], list[str]]:
    """Cells of equal load, and the loads that only one side has.

    Where each side has one load, they meet whatever it is: that it differs is a difference of settings.
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
    found: dict[str, list[ForeignRun]] = {}
    for run in runs:
        told = [f"{key}={_shown(value)}" for key, value in run.load_point if value not in (None, "inf")]
        found.setdefault(" ".join(told) or "unlimited load", []).append(run)
    return found


def _differences(cells: Sequence[_Cell]) -> tuple[Difference, ...]:
    """Settings of which both sides say something, and not the same; those that change inside a side differ, too."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for key in _settings(cell):
            left, right = _values(cell.a, key), _values(cell.b, key)
            if left and right and len({*left, *right}) > 1:
                seen.setdefault((key, " or ".join(left), " or ".join(right)), []).append(cell.label)
    return tuple(
        Difference(key, left, right, () if len(found) == len(cells) else tuple(found))
        for (key, left, right), found in sorted(seen.items())
    )


def _settings(cell: _Cell) -> list[str]:
    """Settings to compare. Tokens of prompts are counted by each tool in its own way."""
    keys = {key for run in (*cell.a, *cell.b) for key in run.settings}
    return sorted(keys - {"total_input_tokens"} if _tools(cell) > 1 else keys)


def _tools(cell: _Cell) -> int:
    return len({run.source for run in (*cell.a, *cell.b)})


def _values(runs: Iterable[ForeignRun], key: str) -> tuple[str, ...]:
    told = (run.settings.get(key) for run in runs)
    return tuple(dict.fromkeys(_shown(value) for value in told if value is not None))


def _shown(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _known_to_all(runs: Sequence[ForeignRun]) -> tuple[str, ...]:
    found = tuple(name for name in DECIDING if all(name in run.metrics for run in runs))
    if not found:
        have = sorted(set.intersection(*(set(run.metrics) for run in runs)))
        raise NotComparableError(
            f"no run tells {' or '.join(DECIDING)} on both sides; all of them tell {', '.join(have) or 'nothing'}. "
            "Name what decides with --metrics"
        )
    return found


def _roles(deciding: Sequence[str], allowed: Sequence[Difference], runs: Sequence[ForeignRun]) -> dict[str, Role]:
    """Counts must be equal, but not where the setting behind them may differ, or nobody knows them."""
    roles = roles_of(deciding, is_forced=False)
    free = {name for difference in allowed for name in _COUNTED.get(difference.key, ())}
    free |= {"prompt_tokens"} if len({run.source for run in runs}) > 1 else set()
    free |= {name for name in roles if METRICS[name].is_exact and any(name not in run.metrics for run in runs)}
    return {name: "exploratory" if role == "exact" and name in free else role for name, role in roles.items()}


def _compare_cell(
    cell: _Cell, names: tuple[str, str], roles: Mapping[str, Role], rules: Rules, *, allow_failed: bool
) -> CellComparison:
    a_metrics, b_metrics = [_metrics(run) for run in cell.a], [_metrics(run) for run in cell.b]
    metrics = compare_metrics(a_metrics, b_metrics, roles, rules)
    failures = tuple(f"{run.where}: {run.failure}" for run in (*cell.a, *cell.b) if run.failure is not None)
    errors = [f"INCOMPLETE: {failure}" for failure in failures] if not allow_failed else []
    if not failures:
        errors += [
            f"{m.metric.name} must be equal and is {m.a:.6g} against {m.b:.6g}"
            for m in metrics
            if m.verdict == "different"
        ]
    return CellComparison(
        label=cell.label,
        a_label=names[0],
        b_label=names[1],
        num_blocks=min(len(cell.a), len(cell.b)),
        num_a_first=None,
        metrics=metrics,
        errors=tuple(errors),
        failures=failures,
    )


def _metrics(run: ForeignRun) -> dict[str, float | None]:
    """Every metric by name; a tail of requests too few to bear it out is unknown, whatever the tool says."""
    found: dict[str, float | None] = dict.fromkeys(METRICS) | dict(run.metrics)
    answered = run.metrics.get("num_completed", 0)
    for percent in PERCENTS:
        if answered < smallest_sample(percent):
            found |= dict.fromkeys((f"p{percent}_{latency}_ms" for latency in LATENCIES), None)
    return found


def _doubts(cells: Sequence[_Cell], unmatched: Sequence[str]) -> list[ResultWarning]:
    runs = [run for cell in cells for run in (*cell.a, *cell.b)]
    sources = sorted({run.source for run in runs})
    found = [
        ResultWarning(
            code="foreign-results",
            message="result files tell neither the order of the runs, nor the server's configuration, nor the "
            "machine: that only the intended change lies between the sides is the word of whoever measured them",
        )
    ]
    if len(sources) > 1:
        found.append(
            ResultWarning(
                code="tools-differ",
                message=f"the runs were measured by different tools ({', '.join(sources)}): a part of any "
                "difference may be theirs, as they start and stop their clocks at other points, and each "
                "counts tokens of prompts in its own way; whether the prompts were the same is not known",
            )
        )
    unknown = sorted({key for cell in cells for key in _settings(cell) if not _told_by_both(cell, key)})
    if unknown:
        found.append(
            ResultWarning(
                code="settings-unknown",
                message=f"not on file for both sides, and so not compared: {', '.join(unknown)}",
            )
        )
    found += [ResultWarning(code="load-unmatched", message=f"only one side has {label}") for label in unmatched]
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return [*found, *(ResultWarning(code="definition", message=note) for note in notes)]


def _told_by_both(cell: _Cell, key: str) -> bool:
    """Whether both sides say something of a setting, or neither does."""
    return bool(_values(cell.a, key)) == bool(_values(cell.b, key))
