"""Why the observed FLOPs of a cell differ from the published ones: named corrections that add up."""

from pathlib import Path

import pytest
from support.results.builders import write_results

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.experiment.summary import flops_bridge
from benchctl.report.documents import summary_document


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
        total = bridge["published_flops"] + sum(step["flops"] for step in bridge["steps"])
        assert total == pytest.approx(bridge["observed_flops"], rel=1e-12)


def test_the_share_of_the_peak_is_that_of_the_device_in_the_wall_time(analysis: AnalyzedExperiment) -> None:
    bridge = flops_bridge(analysis.cells[0])
    assert bridge is not None
    peaks = analysis.experiment.hardware
    assert peaks is not None
    walls_s = [run.number("wall_s") or 0.0 for run in analysis.cells[0].runs]
    shares = [bridge["observed_flops"] / wall_s / peaks.peak_flops_per_s for wall_s in walls_s]
    assert bridge["utilization_frac"] == pytest.approx(sum(shares) / len(shares))


def test_the_greedy_path_is_charged_a_value_model_that_never_ran(analysis: AnalyzedExperiment) -> None:
    _, greedy, guided = (flops_bridge(cell) for cell in analysis.cells)
    assert greedy is not None
    assert guided is not None
    prices = {step["code"]: step["flops"] for step in greedy["steps"]}
    assert prices["candidates"] < 0
    assert prices["value-extend"] < 0
    assert prices["value-prefill"] < 0
    assert guided["observed_flops"] > greedy["observed_flops"]


def test_a_guided_cell_without_step_log_has_no_bridge(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")
    for run in results.runs():
        (run.path / "steps.jsonl").unlink()
    analysis = analyze_directory(tmp_path / "r")
    assert [flops_bridge(cell) is None for cell in analysis.cells] == [False, True]
    assert [cell["flops_bridge"] is None for cell in summary_document(analysis)["cells"]] == [False, True]
