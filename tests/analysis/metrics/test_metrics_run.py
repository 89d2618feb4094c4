"""Metrics of whole runs whose truth is known."""

import msgspec
import pytest
from support.results.builders import T0_NS, edit_requests, edit_run, edit_steps, write_results

from benchctl.analysis.metrics.run import load_window_ns, run_metrics
from benchctl.analysis.metrics.table import METRICS
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.records.record import RequestError, RunRecord, RunTimes
from benchctl.records.schema import GpuSample, HostSample, ResultWarning
from benchctl.units import NS_PER_S

BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))


def metrics_of(results, index=0):
    return run_metrics(load_results(results.path).runs[index])


def run_with(**changes):
    record = RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="v")
    return LoadedRun(**({"record": record} | changes))


def test_a_run_has_every_metric_of_the_table_and_no_other(results):
    assert list(metrics_of(results)) == list(METRICS)
    assert all(metric.name == name and metric.formula and metric.unit for name, metric in METRICS.items())


def test_metrics_of_a_built_run_are_those_of_its_law(results):
    found = metrics_of(results)
    assert found["wall_s"] == pytest.approx(0.08)
    assert found["client_wall_s"] == found["wall_s"]
    assert found["ready_s"] == pytest.approx(1.0)
    assert (found["num_requests"], found["num_completed"], found["num_failed"]) == (4, 4, 0)
    assert found["prompt_tokens"] == 80
    assert found["output_tokens"] == 64
    assert found["output_throughput"] == pytest.approx(800)
    assert found["request_throughput"] == pytest.approx(50)
    assert found["ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(10)
    assert found["tpot_ms"] == found["itl_ms"] == pytest.approx(10)
    assert found["e2el_ms"] == pytest.approx(80)
    assert found["num_steps"] == 8
    assert found["step_ms"] == found["decode_step_ms"] == found["prefill_step_ms"] == pytest.approx(10)
    assert found["tokens_per_step"] == 1
    assert found["batch_tokens_per_step"] == found["mean_batch_size"] == 8
    assert found["guided_step_frac"] == found["greedy_step_frac"] == found["candidates_per_token"] == 0


def test_a_guided_run_counts_its_candidates(results):
    found = metrics_of(results, 1)
    assert found["step_ms"] == pytest.approx(15.5)
    assert found["guided_step_frac"] == 1
    assert found["candidates_per_token"] == 3


def test_a_guided_run_tells_how_much_its_value_model_reused_and_how_often_it_replayed(results):
    assert metrics_of(results, 1)["value_reuse_frac"] is None  # a log of before there was any reuse

    def planted(step):
        # A step of the prompts, then seven that reuse all but one row's token; the last one met a new size.
        is_first, is_last = step.step == 1, step.step == 8
        return msgspec.structs.replace(
            step,
            value_extend_tokens=0 if is_first else 1,
            value_reuse_tokens=0 if is_first else 7,
            value_replayed=not is_last,
            value_recordings=int(is_last),
        )

    edit_steps(results, GUIDED, planted)
    found = metrics_of(results, 1)
    assert found["value_reuse_frac"] == pytest.approx(7 / 8)
    assert found["value_replay_frac"] == pytest.approx(7 / 8)
    assert found["value_recordings"] == 1


def test_steps_without_a_guided_row_do_not_count_where_passes_are_replayed(results):
    edit_steps(
        results,
        GUIDED,
        lambda step: msgspec.structs.replace(
            step,
            value_extend_tokens=None if step.step % 2 else 4,
            value_reuse_tokens=None if step.step % 2 else 4,
            value_replayed=None if step.step % 2 else True,
        ),
    )
    found = metrics_of(results, 1)
    assert (found["value_reuse_frac"], found["value_replay_frac"], found["value_recordings"]) == (0.5, 1, None)


def test_tpot_is_step_time_over_tokens_per_step(results):
    found = metrics_of(results, 1)
    assert found["tpot_ms"] == pytest.approx(found["decode_step_ms"] / found["tokens_per_step"])


def test_durations_of_the_client_are_scaled_on_a_virtual_clock_only(results):
    edit_run(results, BASELINE, clock="virtual", time_scale=20.0)
    scaled = metrics_of(results)
    assert scaled["wall_s"] == pytest.approx(20 * 0.08)
    assert scaled["client_wall_s"] == pytest.approx(0.08)
    assert scaled["ttft_ms"] == pytest.approx(200)
    assert scaled["p50_e2el_ms"] == pytest.approx(1600)
    assert scaled["step_ms"] == pytest.approx(10)
    assert scaled["output_throughput"] == pytest.approx(40)
    edit_run(results, BASELINE, clock="host", time_scale=20.0)
    assert metrics_of(results)["wall_s"] == pytest.approx(0.08)
    assert results.run(BASELINE).read().clock_factor == 1.0


def test_failed_requests_stay_in_the_counts_and_leave_the_tokens(results):
    def fail_first(request):
        if request.index:
            return request
        error = RequestError(kind="timeout", message="no answer in 600 s")
        return msgspec.structs.replace(request, error=error, choices=(), completion_tokens=None)

    edit_requests(results, BASELINE, fail_first)
    found = metrics_of(results)
    assert (found["num_requests"], found["num_completed"], found["num_failed"]) == (4, 3, 1)
    assert found["output_tokens"] == 48
    assert found["request_throughput"] == pytest.approx(3 / 0.08)


def test_warm_up_requests_and_steps_do_not_count(results):
    edit_requests(results, BASELINE, lambda r: msgspec.structs.replace(r, is_warmup=r.index == 0))
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, is_warmup=s.phase == "prefill"))
    found = metrics_of(results)
    assert found["num_requests"] == 3
    assert found["num_steps"] == 7
    assert found["prefill_step_ms"] is None


def test_one_part_unknown_makes_the_sum_unknown(results):
    edit_requests(
        results,
        BASELINE,
        lambda r: msgspec.structs.replace(r, completion_tokens=None) if r.index == 0 else r,
    )
    edit_steps(results, BASELINE, lambda s: msgspec.structs.replace(s, is_greedy=None) if s.step == 1 else s)
    found = metrics_of(results)
    assert found["output_tokens"] is None
    assert found["output_throughput"] is None
    assert found["greedy_step_frac"] is None
    assert found["wall_s"] == pytest.approx(0.08)


def test_the_wall_time_comes_from_the_requests_when_the_run_has_no_times(results):
    edit_run(results, BASELINE, times=RunTimes())
    run = load_results(results.path).runs[0]
    assert load_window_ns(run) == (T0_NS, T0_NS + 80_000_000)
    assert run_metrics(run)["wall_s"] == pytest.approx(0.08)
    assert run_metrics(run)["ready_s"] is None


def test_a_run_without_records_has_no_metrics_and_no_zeros():
    assert set(run_metrics(run_with()).values()) == {None}


def test_speculation_shows_in_tokens_per_step_and_acceptance(results):
    edit_steps(
        results,
        BASELINE,
        lambda s: msgspec.structs.replace(
            s,
            output_tokens=2 * s.num_seqs,
            draft_tokens=4 * s.num_seqs,
            accepted_tokens=s.num_seqs,
            kv_used_blocks=s.step,
        ),
    )
    found = metrics_of(results)
    assert found["tokens_per_step"] == 2
    assert found["acceptance_rate"] == 0.25
    assert found["peak_kv_blocks"] == 8


TIMES = RunTimes(first_send_ns=NS_PER_S, last_token_ns=3 * NS_PER_S)
TIMED = RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="v", times=TIMES)


def gpu(t_s, index, **fields):
    return GpuSample(t_ns=round(t_s * NS_PER_S), index=index, source="nvml", **fields)


@pytest.mark.parametrize(
    ("code", "is_known"), [("gpu-lost", False), ("gpu-unreadable", False), ("gpu-throttled", True)]
)
def test_gpu_metrics_are_unknown_where_a_device_was_not_sampled_throughout(code, is_known):
    record = msgspec.structs.replace(TIMED, warnings=(ResultWarning(code=code, message="GPU 1"),))
    samples = tuple(
        gpu(t_s, 0, power_w=100, energy_j=t_s, memory_used_bytes=1, utilization_frac=1) for t_s in (1, 3)
    )
    found = run_metrics(run_with(record=record, gpu=samples))
    names = ("gpu_energy_j", "gpu_power_w", "gpu_utilization_frac", "gpu_peak_memory_bytes")
    assert {found[name] is not None for name in names} == {is_known}


def test_gpu_metrics_cover_the_load_and_add_over_devices():
    samples = (
        gpu(0.5, 0, power_w=9999, memory_used_bytes=9999, utilization_frac=1.0, energy_j=0),
        gpu(1, 0, power_w=100, memory_used_bytes=10, utilization_frac=0.2, energy_j=1000),
        gpu(1, 1, power_w=300, memory_used_bytes=5, utilization_frac=0.8, energy_j=50),
        gpu(3, 0, power_w=200, memory_used_bytes=30, utilization_frac=0.4, energy_j=1300),
        gpu(3, 1, power_w=300, memory_used_bytes=4, utilization_frac=0.8, energy_j=650),
    )
    found = run_metrics(run_with(record=TIMED, gpu=samples))
    assert found["gpu_energy_j"] == 900
    assert found["gpu_power_w"] == 450
    assert found["gpu_utilization_frac"] == pytest.approx(0.55)
    assert found["gpu_peak_memory_bytes"] == 35


def test_energy_is_integrated_from_power_where_there_is_no_counter():
    samples = (gpu(1, 0, power_w=100), gpu(2, 0, power_w=200), gpu(3, 0, power_w=200))
    assert run_metrics(run_with(record=TIMED, gpu=samples))["gpu_energy_j"] == pytest.approx(350)


@pytest.mark.parametrize(
    "samples",
    [
        (gpu(1, 0, power_w=100),),
        (gpu(1, 0, power_w=100), gpu(2, 0, power_w=100), gpu(1, 1), gpu(2, 1)),
    ],
    ids=["one sample", "a device that reads no power"],
)
def test_energy_that_cannot_be_known_is_none(samples):
    assert run_metrics(run_with(record=TIMED, gpu=samples))["gpu_energy_j"] is None


def test_host_metrics_are_means_over_the_load():
    samples = tuple(
        HostSample(t_ns=t * NS_PER_S, server_cpu_cores=cores) for t, cores in ((0, 9.0), (1, 1.0), (2, 2.0))
    )
    found = run_metrics(run_with(record=TIMED, host=samples))
    assert found["server_cpu_cores"] == 1.5
    assert found["client_cpu_cores"] is None


def test_output_past_the_natural_end_is_a_share_of_all_output(results):
    natural = {0: 10, 1: 16, 2: 20, 3: 4}
    edit_requests(results, BASELINE, lambda r: msgspec.structs.replace(r, natural_tokens=natural[r.index]))
    assert metrics_of(results)["past_eos_frac"] == (6 + 0 + 0 + 12) / 64


def test_output_past_an_end_that_nobody_measured_is_unknown(results):
    edit_requests(results, BASELINE, lambda r: msgspec.structs.replace(r, natural_tokens=16 if r.index else None))
    run = load_results(results.path).runs[0]
    assert run_metrics(run)["past_eos_frac"] is None
