"""Logs that time the sampler alone, as imports of LenVM results have them: nothing takes that for whole steps."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.cli import printed
from support.results.lenvm_results import write_directory

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.validity.checks import in_step_frac, underfilled_batch_warnings
from benchctl.interop.lenvm.import_directory import import_lenvm
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.report.export import write_report
from benchctl.report.page.page import draw_charts

GUIDED_MS = 0.25 + 12 + 36 + 5
"""A sampler's time in the directory, and what guidance adds to it; the value model's load comes on top."""


ALONE = "the step log times the sampler alone: neither duration nor start of a step is known"


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_directory(tmp_path_factory.mktemp("timing") / "Qwen2.5-7B-Instruct_vs_lvm").path
    return import_lenvm(directory, directory.parent / "out", model=None, value_model=None, argv=()).path


@pytest.fixture(name="analysis", scope="module")
def _analysis(path: Path) -> AnalyzedExperiment:
    return analyze_directory(path)


def as_if_whole(run: LoadedRun) -> LoadedRun:
    return replace(run, record=msgspec.structs.replace(run.record, steps_cover="step"))


def test_charts_and_tables_show_the_sampler_and_say_so_or_leave_out_what_needs_whole_steps(
    analysis: AnalyzedExperiment, path: Path
) -> None:
    charts = {chart.id: chart for chart in draw_charts(analysis)}
    sections = charts["sections"]
    assert (sections.skipped, sections.title) == (None, "Time in the sampler by section")
    assert "Not of whole steps: the step log times the sampler alone." in sections.caption
    load_ms = 2500 / analysis.runs[1].number("num_steps")
    lengths_ms = [row["end"] for row in sections.spec["datasets"]["ends"]]
    assert lengths_ms == pytest.approx([0.25, GUIDED_MS + load_ms], rel=1e-5)
    assert {charts[name].skipped for name in ("step-time", "step-time-by-batch-size")} == {ALONE}
    assert f"step_time_over_time.png: {ALONE}" in write_report(path).skipped
    title = "Time in the sampler per step (not of whole steps), ms: sum / all steps (mean where it runs)"
    assert title in printed("show", path)
    comparison = compare_sides(parse_side(f"{path}:baseline"), parse_side(f"{path}:lenvm"), CompareOptions())
    decomposition = comparison.cells[0].decomposition
    assert (decomposition.sections, isinstance(decomposition.work, str)) == (None, True)
    assert "time per step" not in {factor.name for factor in decomposition.wall.parts}


def test_the_samplers_are_no_time_of_steps_in_checks_and_metrics(path: Path) -> None:
    """They are a small part of a request's time: of whole steps, that would be a starved engine."""
    results = load_results(path)
    for run in results.runs:
        assert (in_step_frac(run), underfilled_batch_warnings(run)) == (None, ())
        alone, whole = (
            {check.name: check for check in experiment_of(load_results(path)).checks(each)}
            for each in (run, as_if_whole(run))
        )
        assert alone["step-time"].ok
        assert alone["step-time"].detail.startswith("samplers of the steps ")
        of_batch = ["sequences in the engine's batch" in each["concurrency"].detail for each in (alone, whole)]
        assert of_batch == [False, True]
        metrics = run_metrics(run)
        assert {metrics[name] for name in METRICS if name.endswith("step_ms")} == {None}
        assert metrics["num_steps"] is not None
    doubts = underfilled_batch_warnings(as_if_whole(results.runs[0]))
    assert [doubt.code for doubt in doubts] == ["underfilled-batch"]
