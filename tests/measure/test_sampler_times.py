"""Logs that time the sampler alone, as imports of LenVM results have them: nothing takes that for whole steps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.results.lenvm_results import Truth, write_directory

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.attribution.breakdown import break_down, mean_breakdown
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.experiment import experiment_of, load_experiment
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.validity.answers import Check
from benchctl.analysis.validity.checks import in_step_frac, underfilled_batch_warnings
from benchctl.cli.screen import wide_console
from benchctl.interop.lenvm.import_directory import import_lenvm
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.report.charts.figure import Chart
from benchctl.report.experiment_tables import breakdown_table
from benchctl.report.export import write_report
from benchctl.report.page.page import draw_charts

GUIDED_MS = 0.25 + 12 + 36 + 5
"""A sampler's time in the directory, and what guidance adds to it; the value model's load comes on top."""
ALONE = "the step log times the sampler alone: neither duration nor start of a step is known"


@pytest.fixture(name="truth", scope="module")
def _truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return write_directory(tmp_path_factory.mktemp("timing") / "Qwen2.5-7B-Instruct_vs_lvm")


@pytest.fixture(name="path", scope="module")
def _path(truth: Truth) -> Path:
    return import_lenvm(truth.path, truth.path.parent / "out", model=None, value_model=None, argv=()).path


@pytest.fixture(name="analysis", scope="module")
def _analysis(path: Path) -> AnalyzedExperiment:
    return analyze_directory(path)


def chart(analysis: AnalyzedExperiment, chart_id: str) -> Chart:
    return next(chart for chart in draw_charts(analysis) if chart.id == chart_id)


def runs(path: Path) -> Iterator[LoadedRun]:
    yield from load_results(path).runs


def as_if_whole(run: LoadedRun) -> LoadedRun:
    return replace(run, record=msgspec.structs.replace(run.record, steps_cover="step"))


def checks(path: Path, run: LoadedRun) -> dict[str, Check]:
    results = load_results(path)
    return {check.name: check for check in experiment_of(results).checks(run)}


def test_the_chart_and_the_table_of_sections_show_the_sampler_and_say_so(analysis: AnalyzedExperiment) -> None:
    found = chart(analysis, "sections")
    assert (found.skipped, found.title) == (None, "Time in the sampler by section")
    assert "Not of whole steps: the step log times the sampler alone." in found.caption
    assert found.spec["vconcat"][0]["encoding"]["x"]["title"] == "time in the sampler per step, ms"
    load_ms = 2500 / analysis.runs[1].number("num_steps")
    lengths_ms = [row["end"] for row in found.spec["datasets"]["ends"]]
    assert lengths_ms == pytest.approx([0.25, GUIDED_MS + load_ms], rel=1e-5)
    console = wide_console()
    with console.capture() as shown:
        console.print(breakdown_table(analysis))
    lines = shown.get().splitlines()
    assert lines[0] == "Time in the sampler per step (not of whole steps), ms: sum / all steps (mean where it runs)"
    assert [line.split()[0] for line in lines[3:5]] == ["sampler_total", "pre_lvm"]


def test_what_needs_whole_steps_is_left_out_with_the_reason(analysis: AnalyzedExperiment, path: Path) -> None:
    assert {chart(analysis, name).skipped for name in ("step-time", "step-time-by-batch-size")} == {ALONE}
    assert f"step_time_over_time.png: {ALONE}" in write_report(path).skipped
    comparison = compare_sides(parse_side(f"{path}:baseline"), parse_side(f"{path}:lenvm"), CompareOptions())
    found = comparison.cells[0].decomposition
    assert (found.sections, isinstance(found.work, str)) == (None, True)
    assert "time per step" not in {factor.name for factor in found.wall.parts}


def test_whole_steps_among_them_do_not_make_a_breakdown_one_of_whole_steps(path: Path) -> None:
    run = next(runs(path))
    run_time = load_experiment(path).run_time(run)
    parts = (break_down(run.columns, covers_steps=covers) for covers in (True, False))
    mixed = mean_breakdown([replace(run_time, breakdown=part) for part in parts])
    assert not mixed.covers_steps
    assert (mixed.tree[0].name, mixed.tree[0].mean_ns) == ("sampler_total", pytest.approx(0.25e6))


def test_the_samplers_are_no_time_of_steps_in_checks_and_metrics(path: Path) -> None:
    """They are a small part of a request's time: of whole steps, that would be a starved engine."""
    of_batch = "sequences in the engine's batch"
    for run in runs(path):
        assert (in_step_frac(run), underfilled_batch_warnings(run)) == (None, ())
        found = checks(path, run)
        assert found["step-time"].ok
        assert found["step-time"].detail.startswith("samplers of the steps ")
        assert of_batch not in found["concurrency"].detail
        assert of_batch in checks(path, as_if_whole(run))["concurrency"].detail
        metrics = run_metrics(run)
        assert {metrics[name] for name in METRICS if name.endswith("step_ms")} == {None}
        assert metrics["num_steps"] is not None
    baseline = as_if_whole(next(runs(path)))
    assert [doubt.code for doubt in underfilled_batch_warnings(baseline)] == ["underfilled-batch"]
