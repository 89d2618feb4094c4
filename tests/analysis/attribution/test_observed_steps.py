"""The steps of a result directory: as a tree of sections, as work of a step-time model, and beside their floor."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.results import builders
from support.results.builders import (
    BASELINE,
    GUIDED,
    change_requests,
    change_steps,
    edit_manifest,
    edit_run,
    write_results,
)
from support.results.comparing import compare_arms
from support.servers.simulator import FILTERED, NEUTRAL, measured_steps, request_of, run
from support.step_time import planted_run, write_table
from test_client_guard import run_of, sent

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution import breakdown
from benchctl.analysis.attribution.breakdown import mean_breakdown
from benchctl.analysis.attribution.work import OF_BASE, OF_VALUE, fitted_draft_warnings, floor_of, work_of
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.observed import observed_steps, read_sources, saturation, saturation_signs
from benchctl.costs.hardware import HARDWARE, hardware_for
from benchctl.costs.roofline import guided_floor
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults
from benchctl.records.columns import columns_from
from benchctl.records.record import RequestError
from benchctl.records.schema import SECTION_PARENT, StepRecord
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.work import Deployment, StepWork, most_query_tokens, one_step


def step(dur_ns, sections_ns, *, is_warmup=False):
    return StepRecord(
        step=1, start_ns=0, dur_ns=dur_ns, clock="host", phase="decode", is_warmup=is_warmup, num_seqs=4,
        sections_ns=sections_ns,
    )  # fmt: skip


def break_down(*steps):
    return breakdown.break_down(columns_from(steps))


def test_sections_per_step_add_up_to_the_step_and_remainders_are_named():
    parts = break_down(
        step(100, {"model_forward": 60, "sampler_total": 30, "pre_lvm": 5, "lvm_apply_outer": 20}),
        step(80, {"model_forward": 60, "sampler_total": 10, "sample": 10}),
    )
    assert parts.tree[0].mean_ns == 90
    assert parts.leaf_means_ns == {
        "model_forward": 60.0,
        "pre_lvm": 2.5,
        "lvm_apply_outer": 10.0,
        "sample": 5.0,
        "sampler_total (unnamed)": 2.5,
        "step (unnamed)": 10.0,
    }
    (outer,) = [section for section in parts.tree if section.name == "lvm_apply_outer"]
    assert (outer.mean_ns, outer.record_mean_ns, outer.step_frac) == (10.0, 20.0, 0.5)


def test_the_warm_up_does_not_count_and_what_has_no_place_in_the_tree_stands_outside():
    warmup = step(1_000, {"value_model_load": 900}, is_warmup=True)
    assert break_down(warmup) is None
    parts = break_down(warmup, step(10, {"model_forward": 8, "logprob": 1}))
    assert (parts.unplaced, "value_model_load" in parts.total_ns) == (["logprob"], False)
    assert sum(parts.leaf_means_ns.values()) == parts.tree[0].mean_ns == 10
    assert break_down(step(10, {})).leaf_means_ns == {"step": 10.0}
    assert break_down(step(10, {"step": 4, "model_forward": 9})).tree[0].mean_ns == 10, "it is only called so"


def test_the_mean_over_runs_gives_each_the_same_weight(tmp_path):
    blocks = ({"baseline": 1.0, "guided": 1.0}, {"baseline": 3.0, "guided": 1.0})
    experiment = load_experiment(builders.write_results(tmp_path, block_factors=blocks).path)
    runs = [run for run in experiment.results.runs if run.record.variant == "baseline"]
    assert mean_breakdown([experiment.run_time(run) for run in runs]).tree[0].mean_ns == 2 * builders.STEP_NS


sections = st.dictionaries(st.sampled_from([*SECTION_PARENT, "unheard_of"]), st.integers(0, 10**9))


@given(st.lists(st.builds(step, st.integers(1, 10**9), sections), min_size=1, max_size=8))
def test_every_parent_is_the_sum_of_its_children(steps):
    parts = break_down(*steps)
    whole, *below = parts.tree
    for parent in (section for section in parts.tree if not section.is_leaf):
        after = parts.tree[parts.tree.index(parent) + 1 :]
        inside = itertools.takewhile(lambda section, depth=parent.depth: section.depth > depth, after)
        *named, unnamed = [section for section in inside if section.depth == parent.depth + 1]
        assert unnamed.name == f"{parent.name} (unnamed)"
        total_ns = unnamed.mean_ns + sum(section.mean_ns for section in named)
        assert total_ns == pytest.approx(parent.mean_ns, rel=1e-9, abs=1e-3)
    assert sum(parts.leaf_means_ns.values()) == pytest.approx(whole.mean_ns, rel=1e-9, abs=1e-3)
    assert whole.mean_ns == sum(each.dur_ns for each in steps) / len(steps)
    assert bool(below) != whole.is_leaf


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", loads_in_warmup=True)


def observe(results, index=0, hardware=None):
    experiment = load_experiment(results.path, allow_suspect=True)
    named = None if hardware is None else hardware_for(hardware)
    return observed_steps(experiment, experiment.results.runs[index], named)


def test_prompts_rows_and_guidance_have_their_own_counts_and_the_warm_up_none(results):
    observed = observe(results)
    work = observed.work
    assert (work.num_prefills[0], work.prefill_tokens[0], work.prefill_context[0]) == (8, 160, 0)
    assert work.prefill_positions[0] == 8 * 20 * 20 / 2
    assert (work.num_decodes[1], work.decode_tokens[1]) == (8, 8)
    assert (work.decode_context[1], work.decode_positions[1]) == (8 * 21 - 8, 8 * 20.5)
    np.testing.assert_allclose(observed.duration_us, 10_000.0)
    assert (observed.deployment.shape.name, observed.deployment.hardware.name) == ("qwen2.5-7b", "h100-sxm")
    assert (observed.origin.engine, observed.origin.clock) == ("sim", "host")
    guided = observe(results, 1)
    assert (len(guided.duration_us), guided.duration_us.max() < 100_000) == (8, True)
    assert (guided.work.candidates[1], guided.work.value_prefill_tokens[0]) == (24, 160)
    assert guided.deployment.value_shape is not None


def test_preempted_steps_and_a_full_cache_are_marked(results):
    change_steps(results, BASELINE, 3, preempted=1)
    observed = observe(results)
    assert (observed.left_out, *np.flatnonzero(observed.is_saturated)) == ({"preemption": 1}, 2)
    change_steps(results, BASELINE, preempted=0, kv_used_blocks=50)
    change_steps(results, BASELINE, 6, 7, 8, kv_used_blocks=60)
    edit_run(results, BASELINE, effective_config={"model": "qwen2.5-7b", "num_kv_blocks": 60})
    assert observe(results).left_out == {"key-value memory above 95%": 3}


def test_a_chunked_prompt_continues_where_the_step_before_left_it(results):
    for number, (tokens, context, output) in {1: (100, 100, 0), 2: (100, 200, 0), 3: (56, 256, 1)}.items():
        change_steps(
            results, BASELINE, number, phase="prefill", num_seqs=1, num_prefill_tokens=tokens, num_decode_tokens=0,
            context_tokens=context, output_tokens=output,
        )  # fmt: skip
    work = observe(results).work
    assert work.prefill_context[:3].tolist() == [0, 100, 200]
    assert work.prefill_positions[:3].tolist() == [5000, 15000, 56 * 228]
    assert work.num_sampled[:3].tolist() == [0, 0, 1]


def test_the_device_is_that_of_the_run_and_only_other_peaks_of_it_are_taken(results):
    with pytest.raises(UsageError, match="it ran on h100-sxm, and a100-sxm is named for it: leave out --hardware"):
        observe(results, hardware="a100-sxm")
    measured = "h100-sxm:790:3000:measured=20260131T120000Z"
    assert observe(results, hardware=measured).deployment.hardware.name == measured
    simulated = "{kind: sim, options: {hardware: a100-sxm}}"
    results.write_profile(results.profile_yaml().replace("{kind: sim}", simulated))
    assert observe(results).deployment.hardware.name == "a100-sxm"


def test_a_directory_and_a_table_are_sources_together_and_runs_that_cannot_be_used_say_why(results, tmp_path):
    run = planted_run("qwen2.5-1.5b", 1, {"memory": 1.2, "steps": 100.0}, num_steps=30)
    table = write_table(tmp_path / "steps.csv", replace(run, run="elsewhere"))
    edit_run(results, BASELINE, steps_cover="sampler")
    results.run(GUIDED).step_log.write_text("")
    sources = read_sources([results.path, table], TableDefaults())
    reasons = ["the step log times the sampler alone", "there is no step log"]
    assert [line.split(": ", 1)[1] for line in sources.skipped] == reasons
    assert (len(sources.observed), sources.observed[-1].run) == (5, "elsewhere")
    for each in results.runs():
        edit_run(results, each.path.name, steps_cover="sampler")
    with pytest.raises(UsageError, match=r"no run has steps that a model can use: .*times the sampler alone"):
        read_sources([results.path])


def test_drafts_have_logits_of_their_own_and_accepted_ones_end_no_prompt():
    """Four rows verify three drafts each, and a chunk of a prompt that goes on; eight tokens go to clients."""
    records = [
        StepRecord(
            step=i, start_ns=i, dur_ns=1, clock="virtual", phase="mixed", num_seqs=5, num_prefill_tokens=64,
            num_decode_tokens=16, context_tokens=480 + 64 * i, output_tokens=8 + i, drafts=4, draft_tokens=12,
            accepted_tokens=4,
        )
        for i in (0, 1)
    ]  # fmt: skip
    work = work_of(columns_from(records))
    columns = (work.num_decodes, work.num_prefills, work.num_sampled, work.prefill_context)
    assert [list(column) for column in columns] == [[4, 4], [1, 1], [16, 17], [0, 64]]


PLANTED = {"compute": 1.5, "memory": 1.2, "all_reduce": 1.0, "layers": 40.0, "requests": 8.0, "steps": 90.0}


def test_a_fit_records_its_most_query_tokens_and_only_longer_drafts_are_warned_of():
    assert most_query_tokens(StepWork(num_decodes=np.array([4.0, 8.0]), decode_tokens=np.array([4.0, 18.0]))) == 3
    assert most_query_tokens(one_step(num_decodes=0, context=0, num_prefills=2, prompt_tokens=9)) == 0
    runs = [planted_run("qwen2.5-7b", 1, PLANTED, seed=i, num_steps=60, row_tokens=i) for i in (1, 4)]
    model = fit_model(runs, FitOptions(structure="overlap", num_draws=5))
    older = replace(model, provenance=replace(model.provenance, most_query_tokens=None))
    roofline = replace(older, structure="roofline")
    assert model.provenance.most_query_tokens == 4
    for each, num_draft_tokens, words in (
        (model, 0, None),
        (model, 3, None),
        (model, 4, "m.json: fitted to steps of at most 4 query tokens"),
        (older, 0, None),
        (older, 2, "does not say whether the steps of its fit had drafts"),
        (roofline, 8, None),
    ):
        warnings = fitted_draft_warnings(each, "m.json", num_draft_tokens)
        assert [warning.code for warning in warnings] == (["drafts-not-fitted"] if words else [])
        assert all(words in warning.message for warning in warnings)


def test_a_run_with_two_signs_of_a_load_that_its_server_could_not_take_is_kept_out_of_a_fit(tmp_path):
    growing = [sent(i, 10 * i, chunks_ms=(10 + 5 * i, 20 + 5 * i)) for i in range(40)]
    first, second = saturation_signs(run_of(growing))
    assert first == "first tokens come later and later"
    assert second.startswith("the last fifth waits ")
    assert list(saturation_signs(run_of(growing[:6]))) == [], "few requests have no trend"
    results = write_results(tmp_path, num_requests=30, n=1)
    change_requests(results, BASELINE, 0, 10, 20, error=RequestError(kind="reset", message="gone"))
    run = load_experiment(results.path).results.runs[0]
    assert (list(saturation_signs(run)), saturation(run)) == (["10% of the requests failed"], None)
    change_steps(results, BASELINE, 4, 5, 6, preempted=2)
    sources = read_sources([results.path])
    (reason,) = sources.skipped
    assert f"{BASELINE}: saturated: 10% of the requests failed, 0.2 preemptions a request" in reason
    assert len(sources.observed) == 5


BASE, VALUE, SMALL = (shape_for(f"qwen2.5-{size}") for size in ("7b", "1.5b", "0.5b"))
H200 = HARDWARE["h200-sxm"]
PLAIN = Deployment(shape=BASE, hardware=H200)
GUIDING = Deployment(shape=BASE, value_shape=VALUE.as_value_model(), hardware=H200)
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
    return floor_of(columns_from(steps), GUIDING)


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


def test_a_guided_step_has_a_higher_floor_whose_parts_add_up_the_same_in_show_and_compare(tmp_path):
    results = write_results(tmp_path / "r", cells=[{"top_k": 1}, {"top_k": 5}])
    greedy, guided = analyze_directory(results.path).sweep
    assert greedy.number("step_floor_ratio") == pytest.approx(1)
    step, floor, ratio = guided.work.whole, guided.work.predicted, guided.ratios["step_ms"].estimate.ratio
    assert (guided.number("step_floor_ratio"), floor.ratio > 1) == (floor.ratio, True)
    assert 0 < floor.added_s < step.added_s == pytest.approx(sum(part.added_s for part in guided.work.parts))
    assert (step.ratio, guided.number("step_times_floor")) == pytest.approx((ratio, ratio / floor.ratio))
    compared = compare_arms(results).cells[1].decomposition.work
    assert [part.a_s for part in compared.parts] == [part.a_s for part in guided.work.parts]
    edit_manifest(results, engine="vllm-lenvm", gpus=())
    row = analyze_directory(results.path).sweep[1]
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
    floor = floor_of(columns_from(steps), GUIDING)
    for section, part in (("model_forward", OF_BASE), ("lvm_forward", OF_VALUE)):
        assert 0 < floor.parts[part] == pytest.approx(mean_s(steps, section), rel=0.01)


@pytest.mark.parametrize(("num_requests", "acceptance"), [(1, 0.7), (4, 0.0), (4, 1.0)])
def test_the_floor_of_drafts_is_the_time_of_an_ideal_engine_that_speculates(num_requests, acceptance):
    drafts = {"draft_model": "qwen2.5-0.5b", "num_speculative_tokens": 3, "acceptance": (acceptance,)}
    steps = simulated(num_requests, drafts)
    floor = floor_of(columns_from(steps), PLAIN, draft=SMALL)
    base_s, drafts_s = floor.parts[OF_BASE], floor.parts["draft model's"]
    assert (base_s, base_s + drafts_s) == (floor_of(columns_from(steps), PLAIN).parts[OF_BASE], floor.total_s)
    assert base_s == pytest.approx(mean_s(steps, "model_forward"), rel=0.01)
    assert 0.98 * mean_s(steps, "draft") < drafts_s <= mean_s(steps, "draft")  # a simulated pass also samples


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
        floor_of(columns_from(steps), GUIDING)
