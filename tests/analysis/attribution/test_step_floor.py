"""The floor of a step by models: that of one step, the same in every output, and a reason where it is unknown."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support import cli
from support.results.builders import edit_manifest, write_results
from support.servers.simulator import FILTERED, measured_steps, request_of, run

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.attribution.estimate import Split
from benchctl.analysis.attribution.work import OF_BASE, OF_VALUE, Floor, floor_of
from benchctl.costs.hardware import HARDWARE
from benchctl.costs.roofline import Scoring, guided_floor
from benchctl.costs.shapes import shape_for
from benchctl.guided.params import GuidanceParams
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord
from benchctl.steptime.work import Deployment

BASE, VALUE, H200 = shape_for("qwen2.5-7b"), shape_for("qwen2.5-1.5b"), HARDWARE["h200-sxm"]
ROWS, CONTEXT, CANDIDATES = 64, 300, 5


def logged_floor(**counts: Any) -> Floor:
    """Of ten equal decode steps of 64 rows."""
    of_batch = {
        "num_prefill_tokens": 0,
        "num_decode_tokens": ROWS,
        "output_tokens": ROWS,
        "context_tokens": ROWS * (CONTEXT + 1),
        "guided_rows": ROWS,
        "candidates": ROWS * CANDIDATES,
        "value_prefill_tokens": 0,
    }
    steps = [
        StepRecord(step=i, start_ns=i, dur_ns=1, clock="host", phase="decode", num_seqs=ROWS, **(of_batch | counts))
        for i in range(10)
    ]
    return floor_of(columns_from(steps), Deployment(shape=BASE, value_shape=VALUE.as_value_model(), hardware=H200))


@pytest.mark.parametrize(
    ("scoring", "counts"),
    [
        ("reuse", {"value_extend_tokens": 0, "fused": True}),
        ("recompute", {"value_extend_tokens": ROWS, "fused": True}),
        ("two-phase", {"value_extend_tokens": ROWS, "fused": False}),
    ],
    ids=["reuse", "recompute", "two-phase"],
)
def test_a_logged_step_has_the_floor_of_its_batch_context_and_candidates(
    scoring: Scoring, counts: dict[str, Any]
) -> None:
    of_log = logged_floor(**counts)
    of_step = guided_floor(BASE, VALUE, H200, batch=ROWS, candidates=CANDIDATES, context=CONTEXT, scoring=scoring)
    assert of_log.total_s == pytest.approx(of_step.step_s, rel=1e-12)
    expected = {OF_BASE: of_step.base_s, OF_VALUE: of_step.value_s}
    expected |= {"sampling's": of_step.sampling_s, "draft model's": 0.0}
    assert of_log.parts == pytest.approx(expected, rel=1e-9)


def test_fewer_candidates_than_k_and_fewer_rows_lower_the_floor() -> None:
    full = logged_floor(value_extend_tokens=0)
    few = logged_floor(value_extend_tokens=0, guided_rows=16, candidates=40)
    assert few.total_s < full.total_s
    assert few.parts[OF_BASE] == full.parts[OF_BASE]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("floor") / "r"
    write_results(path, cells=[{"top_k": 1}, {"top_k": 5}])
    return path


@pytest.fixture(name="analysis", scope="module")
def _analysis(path: Path) -> AnalyzedExperiment:
    return analyze_directory(path)


def test_a_guided_step_has_a_higher_floor_and_the_parts_of_the_step_add_up(analysis: AnalyzedExperiment) -> None:
    greedy, guided = analysis.sweep
    assert greedy.number("step_floor_ratio") == pytest.approx(1)
    assert isinstance(guided.work, Split)
    step, floor = guided.work.whole, guided.work.predicted
    assert floor is not None
    assert floor.ratio is not None
    assert floor.ratio > 1
    assert 0 < floor.added_s < step.added_s
    assert sum(part.added_s for part in guided.work.parts) == pytest.approx(step.added_s)
    assert step.ratio == pytest.approx(guided.ratios["step_ms"].estimate.ratio)
    assert guided.number("step_floor_ratio") == floor.ratio
    assert guided.number("step_times_floor") == pytest.approx(guided.ratios["step_ms"].estimate.ratio / floor.ratio)


def test_show_and_compare_print_the_same_floor(path: Path, analysis: AnalyzedExperiment) -> None:
    guided = analysis.sweep[1]
    assert isinstance(guided.work, Split)
    shown = json.loads(cli.benchctl("show", str(path), "--json").stdout)["sweep"][1]["work"]
    (compared,) = json.loads(cli.benchctl("compare", str(path), "--json").stdout)["comparisons"]
    assert compared["cells"][1]["decomposition"]["work"] == shown
    assert [part["a_s"] for part in shown["parts"]] == [part.a_s for part in guided.work.parts]
    text = cli.benchctl("compare", str(path), "--all").stdout
    assert "value model's FLOPs and bytes" in text


def test_without_known_peaks_no_floor_is_printed_for_a_reason(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")
    edit_manifest(results, engine="vllm-lenvm", gpus=())
    (row,) = analyze_directory(tmp_path / "r").sweep
    assert row.work == "the peaks of the device are unknown"
    assert row.number("step_floor_ratio") is None


@pytest.mark.parametrize("revision", ["V1", "V2"])
def test_a_simulated_server_that_is_nothing_but_a_roofline_reaches_the_floor_but_for_its_sampler(
    revision: str,
) -> None:
    """Its sampler moves the probabilities eight times, the floor's guidance the logits twice."""
    means, floors = {}, {}
    tilt = GuidanceParams(mode="centered_exp", value_scale=-3.0)
    for name, guidance in (("base", None), ("guided", tilt)):
        simulation = run(
            [
                request_of(f"r{i}", prompt_tokens=100, max_tokens=40, sampling=FILTERED, guidance=guidance)
                for i in range(32)
            ],
            model="qwen2.5-7b",
            value_model="qwen2.5-1.5b" if guidance else None,
            hardware="h200-sxm",
            cost_model="roofline",
            noise="none",
            revision=revision,
        )
        steps = [step for step in measured_steps(simulation) if step.phase == "decode"]
        means[name] = fmean(step.dur_ns for step in steps)
        value = VALUE.as_value_model() if guidance else None
        floor = floor_of(columns_from(steps), Deployment(shape=BASE, value_shape=value, hardware=H200))
        floors[name] = floor.total_s
    measured, expected = means["guided"] / means["base"], floors["guided"] / floors["base"]
    assert expected < measured < 1.02 * expected
    assert expected > 1.15
