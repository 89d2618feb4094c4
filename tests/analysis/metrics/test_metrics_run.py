"""Metrics of requests and of whole runs whose truth is known, also of GPUs, hosts, counters and drafts."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.results.builders import (
    BASELINE,
    GUIDED,
    ONE_BLOCK,
    change_requests,
    change_steps,
    edit_run,
    write_results,
)
from test_client_guard import run_of

from benchctl.analysis.metrics.chunks import chunks_of, latencies_ns
from benchctl.analysis.metrics.latency import (
    is_completed,
    known_values,
    mean_of_known,
    measured,
    percentiles,
    quotient,
    send_lag_ns,
    smallest_sample,
    total,
)
from benchctl.analysis.metrics.run import DraftCounts, draft_counts, load_window_ns, run_drafts, run_metrics
from benchctl.analysis.metrics.server_counters import COUNTERS, measure_growth, measure_growth_by_position
from benchctl.analysis.metrics.table import METRICS, OF_SLO
from benchctl.engines.metrics_page import series_of
from benchctl.records.columns import columns_from
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord, RunRecord, RunTimes
from benchctl.records.schema import GpuSample, HostSample, PrometheusSample, ResultWarning, StepRecord
from benchctl.units import NS_PER_S

ONE_CHOICE = RequestRecord(
    request_id="r0",
    index=0,
    scheduled_ns=90,
    sent_ns=100,
    done_ns=500,
    choices=(ChoiceRecord(index=0, chunk_ns=(200, 300, 460), output_tokens=5),),
    prompt_tokens=7,
    completion_tokens=14,
)
TWO_CHOICES = RequestRecord(
    request_id="r1",
    index=1,
    scheduled_ns=100,
    sent_ns=100,
    done_ns=900,
    choices=(
        ChoiceRecord(index=0, chunk_ns=(250, 450), output_tokens=5),
        ChoiceRecord(index=1, chunk_ns=(210, 810), chunk_tokens=(1, 3)),
    ),
    completion_tokens=9,
)
NOTHING = RequestRecord(request_id="r2", index=2, scheduled_ns=100)


@pytest.mark.parametrize(
    ("record", "ttft", "e2el", "itls", "send_lag"),
    [
        (ONE_CHOICE, 100, 360, [100, 160], 10),
        (TWO_CHOICES, 110, 710, [200, 600], 0),
        (NOTHING, None, None, [], None),
    ],
)
def test_latencies_follow_vllms_definitions_and_span_all_choices(record, ttft, e2el, itls, send_lag):
    (answer,) = chunks_of([record]).answers
    assert (answer.ttft_ns, answer.e2el_ns, send_lag_ns(record)) == (ttft, e2el, send_lag)
    assert list(latencies_ns([record])["itl"]) == itls


def test_tpot_divides_by_the_tokens_of_usage_or_of_each_choice():
    silent = ChoiceRecord(index=0, chunk_ns=(1, 2))
    unknown = msgspec.structs.replace(TWO_CHOICES, choices=(silent, silent))
    one_token = (ChoiceRecord(index=0, chunk_ns=(5,)),)
    for request, tpots in (
        (ONE_CHOICE, (260 / 13,)),
        (TWO_CHOICES, (200 / 4, 600 / 3)),
        (unknown, ()),  # usage of several choices says nothing of one of them
        (msgspec.structs.replace(ONE_CHOICE, choices=one_token, completion_tokens=1), ()),
    ):
        assert chunks_of([request]).answers[0].tpots_ns == list(tpots)


def test_the_load_spans_first_send_to_last_output_of_what_is_measured():
    assert load_window_ns(run_of([ONE_CHOICE, TWO_CHOICES, NOTHING])) == (100, 810)
    assert load_window_ns(run_of([NOTHING])) is None
    failed = msgspec.structs.replace(ONE_CHOICE, error=RequestError(kind="timeout", message="late"))
    assert [is_completed(request) for request in (ONE_CHOICE, NOTHING, failed)] == [True, False, False]
    assert measured([msgspec.structs.replace(NOTHING, is_warmup=True), ONE_CHOICE]) == (ONE_CHOICE,)


@pytest.mark.parametrize(("percent", "needed"), [(50, 1), (90, 29), (95, 59), (99, 299)])
def test_a_tail_percentile_needs_as_many_requests_as_bound_it(percent, needed):
    assert smallest_sample(percent) == needed
    assert percentiles([1.0, 2.0], needed - 1, (percent,))[percent] is None or percent == 50
    assert percentiles([1.0, 2.0], needed, (percent,))[percent] == pytest.approx(1 + percent / 100)
    assert percentiles([], 1000, (percent,)) == {percent: None}


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50), st.floats(0.001, 1000))
def test_percentiles_lie_in_order_within_the_values_and_scale_with_them(values, factor):
    ordered, scaled = (
        [percentiles([value * by for value in values], 1000)[percent] for percent in (50, 90, 95, 99)]
        for by in (1, factor)
    )
    assert ordered == sorted(ordered)
    assert min(values) <= ordered[0] <= ordered[-1] <= max(values)
    assert np.allclose(scaled, np.array(ordered) * factor, rtol=1e-9, atol=1e-9)


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=ONE_BLOCK)


def metrics_of(results, index=0):
    return run_metrics(load_results(results.path).runs[index])


def assert_are(metrics, **expected):
    assert {name: metrics[name] for name in expected} == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in expected.items()
    }


def test_metrics_of_a_built_run_are_those_of_its_law_and_of_the_table(results):
    metrics = metrics_of(results)
    assert list(metrics) == [name for name in METRICS if name not in OF_SLO]
    assert all(metric.name == name and metric.formula and metric.unit for name, metric in METRICS.items())
    assert_are(
        metrics,
        **dict.fromkeys(("wall_s", "client_wall_s"), 0.08),
        **dict.fromkeys(("ttft_ms", "p50_ttft_ms", "tpot_ms", "itl_ms"), 10.0),
        **dict.fromkeys(("step_ms", "decode_step_ms", "prefill_step_ms"), 10.0),
        **dict.fromkeys(("guided_step_frac", "greedy_step_frac", "candidates_per_token"), 0),
        ready_s=1.0,
        num_requests=4,
        num_completed=4,
        num_failed=0,
        prompt_tokens=80,
        output_tokens=64,
        output_throughput=800.0,
        request_throughput=50.0,
        e2el_ms=80.0,
        num_steps=8,
        tokens_per_step=1,
        batch_tokens_per_step=8,
        mean_batch_size=8,
    )
    of_guided = {"step_ms": 15.5, "tpot_ms": 15.5, "guided_step_frac": 1, "candidates_per_token": 3}
    assert_are(metrics_of(results, 1), **of_guided, value_reuse_frac=None)


def test_a_guided_run_tells_how_much_its_value_model_reused_and_how_often_it_replayed(results):
    # A step of the prompts, then seven that reuse all but one row's token; the last one met a new size.
    change_steps(
        results, GUIDED, value_extend_tokens=1, value_reuse_tokens=7, value_replayed=True, value_recordings=0
    )
    change_steps(results, GUIDED, 1, value_extend_tokens=0, value_reuse_tokens=0)
    change_steps(results, GUIDED, 8, value_replayed=False, value_recordings=1)
    assert_are(metrics_of(results, 1), value_reuse_frac=7 / 8, value_replay_frac=7 / 8, value_recordings=1)


def test_durations_of_the_client_are_scaled_on_a_virtual_clock_only(results):
    edit_run(results, BASELINE, clock="virtual", time_scale=20.0)
    assert_are(
        metrics_of(results), wall_s=20 * 0.08, client_wall_s=0.08, ttft_ms=200.0, p50_e2el_ms=1600.0, step_ms=10.0,
        output_throughput=40.0,
    )  # fmt: skip
    edit_run(results, BASELINE, clock="host", time_scale=20.0)
    assert_are(metrics_of(results), wall_s=0.08)


def test_failed_requests_stay_in_the_counts_and_leave_the_tokens_and_warm_up_counts_for_nothing(results):
    error = RequestError(kind="timeout", message="no answer in 600 s")
    change_requests(results, BASELINE, 0, error=error, choices=(), completion_tokens=None)
    counts = {"num_requests": 4, "num_completed": 3, "num_failed": 1}
    assert_are(metrics_of(results), **counts, output_tokens=48, request_throughput=3 / 0.08)
    change_requests(results, BASELINE, 0, is_warmup=True)
    change_steps(results, BASELINE, 1, is_warmup=True)
    assert_are(metrics_of(results), num_requests=3, num_failed=0, num_steps=7, prefill_step_ms=None)


def test_one_part_unknown_makes_the_sum_unknown(results):
    change_requests(results, BASELINE, 0, completion_tokens=None)
    change_steps(results, BASELINE, 1, is_greedy=None)
    unknown = dict.fromkeys(("output_tokens", "output_throughput", "greedy_step_frac"))
    assert_are(metrics_of(results), wall_s=0.08, **unknown)
    assert (total([1, 2, 0]), total([1, None, 2]), total([]), known_values([1, None, 0])) == (3, None, None, [1, 0])
    assert (mean_of_known([1.0, None, 2.0]), mean_of_known([None])) == (1.5, None)
    assert [quotient(a, b) for a, b in ((0, 2), (None, 2), (1, None), (1, 0))] == [0, None, None, None]


def test_the_wall_time_comes_from_the_requests_when_the_run_has_no_times(results):
    edit_run(results, BASELINE, times=RunTimes())
    assert_are(metrics_of(results), wall_s=0.08, ready_s=None)


def test_speculation_blocks_of_the_cache_and_output_past_the_natural_end_show_in_metrics(results):
    change_steps(results, BASELINE, output_tokens=16, draft_tokens=32, accepted_tokens=8, kv_used_blocks=1)
    change_steps(results, BASELINE, 5, kv_used_blocks=8)
    change_requests(results, BASELINE, natural_tokens=20)
    change_requests(results, BASELINE, 0, natural_tokens=10)
    shares = {"acceptance_rate": 0.25, "past_eos_frac": 6 / 64}
    assert_are(metrics_of(results), tokens_per_step=2, peak_kv_blocks=8, **shares)
    change_requests(results, BASELINE, 1, natural_tokens=None)
    assert metrics_of(results)["past_eos_frac"] is None, "an end that nobody measured"


TIMES = RunTimes(first_send_ns=NS_PER_S, last_token_ns=3 * NS_PER_S)
TIMED = RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="v", times=TIMES)


def timed(*readings, warnings=(), host=()):
    """Metrics of a load from second 1 to 3 with readings of GPUs: time in s, device, power, memory, use, energy."""
    names = ("index", "power_w", "memory_used_bytes", "utilization_frac", "energy_j")
    gpu = tuple(
        GpuSample(t_ns=round(t_s * NS_PER_S), source="nvml", **dict(zip(names, values, strict=False)))
        for t_s, *values in readings
    )
    record = msgspec.structs.replace(TIMED, warnings=tuple(warnings))
    return run_metrics(LoadedRun(record=record, gpu=gpu, host=tuple(host)))


def test_gpu_metrics_cover_the_load_and_add_over_devices():
    metrics = timed(
        (0.5, 0, 9999, 9999, 1.0, 0),
        (1, 0, 100, 10, 0.2, 1000),
        (1, 1, 300, 5, 0.8, 50),
        (3, 0, 200, 30, 0.4, 1300),
        (3, 1, 300, 4, 0.8, 650),
    )
    assert_are(metrics, gpu_energy_j=900, gpu_power_w=450, gpu_utilization_frac=0.55, gpu_peak_memory_bytes=35)
    for readings, energy_j in (
        ([(1, 0, 100), (2, 0, 200), (3, 0, 200)], 350.0),  # where there is no counter
        ([(1, 0, 100)], None),
        ([(1, 0, 100), (2, 0, 100), (1, 1), (2, 1)], None),  # a device that reads none
    ):
        assert_are(timed(*readings), gpu_energy_j=energy_j)


@pytest.mark.parametrize(
    ("code", "is_known"), [("gpu-lost", False), ("gpu-unreadable", False), ("gpu-throttled", True)]
)
def test_gpu_metrics_are_unknown_where_a_device_was_not_sampled_throughout(code, is_known):
    metrics = timed(
        (1, 0, 100, 1, 1, 1), (3, 0, 100, 1, 1, 3), warnings=[ResultWarning(code=code, message="GPU 1")]
    )
    names = ("gpu_energy_j", "gpu_power_w", "gpu_utilization_frac", "gpu_peak_memory_bytes")
    assert {metrics[name] is not None for name in names} == {is_known}


def test_host_metrics_are_means_over_the_load_and_a_run_without_records_has_none():
    loads = ((0, 9.0), (1, 1.0), (2, 2.0))
    metrics = timed(host=[HostSample(t_ns=t * NS_PER_S, server_cpu_cores=cores) for t, cores in loads])
    assert_are(metrics, server_cpu_cores=1.5, client_cpu_cores=None)
    bare = run_metrics(LoadedRun(record=msgspec.structs.replace(TIMED, times=RunTimes())))
    assert set(bare.values()) == {None}


def test_counters_of_a_server_that_states_what_no_counter_can_be():
    def grown(*pages):
        return [PrometheusSample(t_ns=i, values=series_of(page)) for i, page in enumerate(pages)]

    position, generated = COUNTERS.accepted_by_position[0], COUNTERS.generated_tokens[0]
    pages = [f'{position}{{position="0"}} {i}\n{position}{{position="{10**14}"}} {i}\n' for i in (1, 4)]
    assert measure_growth_by_position(grown(*pages), COUNTERS.accepted_by_position) == (3,), "no draft is so long"
    for value in ("1e308", "-1e308", "1e19", "NaN", "+Inf"):
        page = f'{generated}{{a="1"}} {value}\n{generated}{{a="2"}} {value}\n'
        assert measure_growth(grown(page, page), COUNTERS.generated_tokens) is None, value
    assert measure_growth(grown(f"{generated} 9\n", f"{generated} 4\n"), COUNTERS.generated_tokens).count == -5


def step(number, **changed):
    return StepRecord(
        step=number, start_ns=10 * number, dur_ns=7, clock="host", phase="decode", num_seqs=4, **changed
    )


STEPS = (
    step(0, drafts=4, draft_tokens=12, accepted_tokens=6, accepted_by_position=(3, 2, 1)),
    step(1),
    step(2, drafts=4, draft_tokens=8, accepted_tokens=4, accepted_by_position=(3, 1)),
)


def test_counts_are_sums_over_the_steps_that_drafted_and_rates_are_what_vllm_calls_so():
    drafted = DraftCounts(drafts=8, draft_tokens=20, accepted_tokens=10, accepted_by_position=(6, 3, 1))
    assert draft_counts(columns_from(STEPS)) == drafted
    assert drafted.metrics == {
        "drafts": 8,
        "draft_tokens": 20,
        "accepted_tokens": 10,
        "acceptance_rate": 10 / 20,
        "acceptance_length": 1 + 10 / 8,
    }
    shares = [(each.position, each.accepted, each.survival, each.conditional) for each in drafted.positions]
    assert shares == [(1, 6, 0.75, 0.75), (2, 3, 0.375, 0.5), (3, 1, 0.125, pytest.approx(1 / 3))]
    unreached = DraftCounts(drafts=5, draft_tokens=10, accepted_tokens=0, accepted_by_position=(0, 0))
    assert [(each.survival, each.conditional) for each in unreached.positions] == [(0, 0), (0, None)]
    nothing = draft_counts(columns_from([step(0)]))
    assert (nothing, nothing.positions, {*nothing.metrics.values()}) == (DraftCounts(), (), {None})
    rates = DraftCounts(drafts=0, draft_tokens=0, accepted_tokens=0).metrics
    assert (rates["drafts"], rates["acceptance_rate"], rates["acceptance_length"]) == (0, None, None)


def test_a_server_without_a_step_log_has_its_counters():
    names = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    names += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}' for i in range(2)]
    first, last = (
        PrometheusSample(t_ns=t_ns, values=dict(zip(names, map(float, values), strict=True)))
        for t_ns, values in ((0, (5, 10, 6, 4, 2)), (9, (9, 18, 12, 8, 4)))
    )
    run = LoadedRun(record=TIMED, prometheus=(first, last))
    assert run_drafts(run) == DraftCounts(drafts=4, draft_tokens=8, accepted_tokens=6, accepted_by_position=(4, 2))
    assert run_drafts(replace(run, prometheus=(first,))) == DraftCounts()
    assert run_metrics(run)["acceptance_length"] == 2.5
