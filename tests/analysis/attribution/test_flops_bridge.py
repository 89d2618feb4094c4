"""Why the observed FLOPs of a cell differ from the published ones: named corrections that add up."""

import io
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.results.builders import write_results

from benchctl.analysis.summary.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.summary.flops_bridge import flops_bridge
from benchctl.report.documents.documents import summary_document
from benchctl.report.tables.experiment import flops_table


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> AnalyzedExperiment:
    path = tmp_path_factory.mktemp("bridge") / "r"
    write_results(path, cells=[{"top_k": 1}, {"top_k": 5}])
    return analyze_directory(path)


def test_the_corrections_lead_from_the_published_to_the_observed_total(analysis: AnalyzedExperiment) -> None:
    bridges = {cell.label: flops_bridge(cell) for cell in analysis.cells}
    assert list(bridges) == ["baseline", "guided top_k=1", "guided top_k=5"]
    for bridge in bridges.values():
        assert bridge is not None
        total = bridge.published_flops + sum(step.flops for step in bridge.steps)
        assert total == pytest.approx(bridge.observed_flops, rel=1e-12)


def test_the_greedy_path_is_charged_a_value_model_that_never_ran(analysis: AnalyzedExperiment) -> None:
    _, greedy, guided = (flops_bridge(cell) for cell in analysis.cells)
    assert greedy is not None
    assert guided is not None
    prices = {step.code: step.flops for step in greedy.steps}
    assert prices["candidates"] < 0
    assert prices["value-extend"] < 0
    assert prices["value-prefill"] < 0
    assert guided.observed_flops > greedy.observed_flops


def test_a_guided_cell_without_step_log_has_no_bridge(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")
    for run in results.runs():
        (run.path / "steps.jsonl").unlink()
    analysis = analyze_directory(tmp_path / "r")
    assert [flops_bridge(cell) is None for cell in analysis.cells] == [False, True]
    assert [cell["flops_bridge"] is None for cell in summary_document(analysis)["cells"]] == [False, True]


def test_without_finished_runs_there_is_no_table(tmp_path: Path) -> None:
    write_results(tmp_path / "r", block_factors=[])
    assert flops_table(analyze_directory(tmp_path / "r")) is None


def test_the_table_shows_each_correction_and_why(analysis: AnalyzedExperiment) -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(flops_table(analysis))
    shown = capture.get()
    for words in ["published", "observed", "candidates", "top_k=5", "candidates scored, not top_k"]:
        assert words in shown
    assert "989.4 TFLOP/s of h100-sxm, NVIDIA H100 data sheet" in shown
    documents = {cell["variant"]: cell["flops_bridge"] for cell in summary_document(analysis)["cells"]}
    assert {step["code"] for step in documents["guided"]["steps"]} >= {"candidates", "value-prefill"}


def enlarged(value: Any) -> Any:
    """FLOPs counts with every number of theirs 100,000 times as large."""
    if isinstance(value, tuple):
        return tuple(map(enlarged, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: enlarged(getattr(value, field.name)) for field in fields(value)})
    return value * 100_000 if isinstance(value, int | float) else value


def test_large_corrections_are_written_out_as_their_totals_are(analysis: AnalyzedExperiment) -> None:
    cells = tuple(
        replace(cell, runs=tuple(replace(run, flops=enlarged(run.flops)) for run in cell.runs))
        for cell in analysis.cells
    )
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(flops_table(replace(analysis, cells=cells)))
    words = [line.split() for line in capture.get().splitlines()]
    rows = {row[0]: row[1] for row in words if len(row) > 3 and row[1][-1].isdigit()}
    assert all(abs(float(rows[code])) > 1000 for code in ("published", "candidates"))
    assert not any("e" in value for value in rows.values())
