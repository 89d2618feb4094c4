"""The floor of a step by models: that of one step, the same in every output, and a reason where it is unknown."""

from contextlib import nullcontext
from statistics import fmean

import msgspec
import pytest
from support.results.builders import edit_manifest, write_results
from support.results.comparing import compare_arms
from support.servers.simulator import FILTERED, NEUTRAL, measured_steps, request_of, run

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.work import OF_BASE, OF_VALUE, floor_of
from benchctl.costs.hardware import HARDWARE
from benchctl.costs.roofline import guided_floor
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.guided.params import GuidanceParams
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord
from benchctl.steptime.work import Deployment

BASE, VALUE, SMALL = (shape_for(f"qwen2.5-{size}") for size in ("7b", "1.5b", "0.5b"))
H200 = HARDWARE["h200-sxm"]
PLAIN = Deployment(shape=BASE, hardware=H200)
GUIDED = Deployment(shape=BASE, value_shape=VALUE.as_value_model(), hardware=H200)
ROWS, CONTEXT, CANDIDATES = 64, 300, 5


def logged_floor(**counts):
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
        StepRecord(step=i, start_ns=i, dur_ns=1, clock="host", phase="decode", num_seqs=ROWS, **of_batch | counts)
        for i in range(10)
    ]
    return floor_of(columns_from(steps), GUIDED)


@pytest.mark.parametrize(
    ("scoring", "counts"),
    [
        ("reuse", {"value_extend_tokens": 0, "fused": True}),
        ("recompute", {"value_extend_tokens": ROWS, "fused": True}),
        ("two-phase", {"value_extend_tokens": ROWS, "fused": False}),
    ],
    ids=["reuse", "recompute", "two-phase"],
)
def test_a_logged_step_has_the_floor_of_its_batch_context_and_candidates(scoring, counts):
    of_log = logged_floor(**counts)
    of_step = guided_floor(BASE, VALUE, H200, batch=ROWS, candidates=CANDIDATES, context=CONTEXT, scoring=scoring)
    assert of_log.total_s == pytest.approx(of_step.step_s, rel=1e-12)
    expected = {OF_BASE: of_step.base_s, OF_VALUE: of_step.value_s}
    expected |= {"sampling's": of_step.sampling_s, "draft model's": 0.0}
    assert of_log.parts == pytest.approx(expected, rel=1e-9)


def test_fewer_candidates_than_k_and_fewer_rows_lower_the_floor():
    full = logged_floor(value_extend_tokens=0)
    few = logged_floor(value_extend_tokens=0, guided_rows=16, candidates=40)
    assert few.total_s < full.total_s
    assert few.parts[OF_BASE] == full.parts[OF_BASE]


def test_a_guided_step_has_a_higher_floor_whose_parts_add_up_the_same_in_show_and_compare(tmp_path):
    results = write_results(tmp_path / "r", cells=[{"top_k": 1}, {"top_k": 5}])
    greedy, guided = analyze_directory(results.path).sweep
    assert greedy.number("step_floor_ratio") == pytest.approx(1)
    step, floor = guided.work.whole, guided.work.predicted
    assert floor.ratio > 1
    assert 0 < floor.added_s < step.added_s
    assert sum(part.added_s for part in guided.work.parts) == pytest.approx(step.added_s)
    ratio = guided.ratios["step_ms"].estimate.ratio
    assert step.ratio == pytest.approx(ratio)
    assert guided.number("step_floor_ratio") == floor.ratio
    assert guided.number("step_times_floor") == pytest.approx(ratio / floor.ratio)
    compared = compare_arms(results).cells[1].decomposition.work
    assert [part.a_s for part in compared.parts] == [part.a_s for part in guided.work.parts]


def test_without_known_peaks_no_floor_is_printed_for_a_reason(tmp_path):
    edit_manifest(write_results(tmp_path / "r"), engine="vllm-lenvm", gpus=())
    (row,) = analyze_directory(tmp_path / "r").sweep
    assert (row.work, row.number("step_floor_ratio")) == ("the peaks of the device are unknown", None)


def simulated(num_requests, config, *, prompt_tokens=lambda i: 100 + 20 * i, max_tokens=30, **sampling):
    """Steps of an engine that is nothing but a roofline."""
    requests = [
        request_of(f"r{i}", prompt_tokens=prompt_tokens(i), max_tokens=max_tokens, **sampling)
        for i in range(num_requests)
    ]
    engine = {"model": "qwen2.5-7b", "hardware": "h200-sxm", "cost_model": "roofline", "noise": "none"}
    return measured_steps(run(requests, **engine | config))


def mean_s(steps, section):
    return fmean(step.sections_ns.get(section, 0) for step in steps) / 1e9


@pytest.mark.parametrize("num_requests", [1, 8, 48])
def test_the_floor_of_a_step_is_the_time_of_an_engine_that_is_nothing_but_a_roofline(num_requests):
    """The simulator's ideal engine knows every sequence, the floor only what a step log counts."""
    steps = simulated(num_requests, {"value_model": "qwen2.5-1.5b"}, sampling=FILTERED, guidance=NEUTRAL)
    floor = floor_of(columns_from(steps), GUIDED)
    for section, part in (("model_forward", OF_BASE), ("lvm_forward", OF_VALUE)):
        assert 0 < floor.parts[part] == pytest.approx(mean_s(steps, section), rel=0.01)


@pytest.mark.parametrize(("num_requests", "acceptance"), [(1, 0.7), (4, 0.0), (4, 1.0)])
def test_the_floor_of_drafts_is_the_time_of_an_ideal_engine_that_speculates(num_requests, acceptance):
    drafts = {"draft_model": "qwen2.5-0.5b", "num_speculative_tokens": 3, "acceptance": (acceptance,)}
    steps = simulated(num_requests, drafts)
    floor = floor_of(columns_from(steps), PLAIN, draft=SMALL)
    base_s, drafts_s = floor.parts[OF_BASE], floor.parts["draft model's"]
    assert base_s == pytest.approx(mean_s(steps, "model_forward"), rel=0.01)
    draft_s = mean_s(steps, "draft")
    assert 0.98 * draft_s < drafts_s <= draft_s  # a simulated pass also samples
    assert floor.total_s == base_s + drafts_s
    assert floor_of(columns_from(steps), PLAIN).parts[OF_BASE] == base_s


@pytest.mark.parametrize("revision", ["V1", "V2"])
def test_a_simulated_server_that_is_nothing_but_a_roofline_reaches_the_floor_but_for_its_sampler(revision):
    """Its sampler moves the probabilities eight times, the floor's guidance the logits twice."""
    means, floors = [], []
    tilt = GuidanceParams(mode="centered_exp", value_scale=-3.0)
    for deployment, guidance, value_model in ((PLAIN, None, None), (GUIDED, tilt, "qwen2.5-1.5b")):
        steps = simulated(
            32, {"value_model": value_model, "revision": revision}, prompt_tokens=lambda _: 100, max_tokens=40,
            sampling=FILTERED, guidance=guidance,
        )  # fmt: skip
        decoding = [step for step in steps if step.phase == "decode"]
        means.append(fmean(step.dur_ns for step in decoding))
        floors.append(floor_of(columns_from(decoding), deployment).total_s)
    expected = floors[1] / floors[0]
    assert 1.15 < expected < means[1] / means[0] < 1.02 * expected


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        ("context_tokens", "the step log does not count context_tokens in every step"),
        ("candidates", "the step log does not count candidates in every step"),
        ("output_tokens", None),
    ],
)
def test_what_the_step_log_does_not_count_has_no_floor(left_out, reason):
    logged = simulated(1, {"value_model": "qwen2.5-1.5b"}, sampling=FILTERED, guidance=NEUTRAL)
    steps = [msgspec.structs.replace(step, **{left_out: None}) for step in logged]
    with pytest.raises(UsageError, match=reason) if reason else nullcontext():
        floor_of(columns_from(steps), GUIDED)
