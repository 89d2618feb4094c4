"""Forward passes as an experiment: what is on disk, what it means, measured floors, and what can go wrong."""

import json
import platform
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest
from support import bonus_directory
from support.bonus_directory import BOTH, LAUNCHES_US, LISTENER, ROW_US, measure
from support.cli import benchctl
from support.fake_passes import A100, CPU, FakeWorkers, info_of
from support.peaks import cpu_peaks, gpu_peaks

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.bonus import bonus_design, measured_bonus
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.pairing import baseline_pairs
from benchctl.costs.hardware import HARDWARE
from benchctl.errors import RunError, UsageError
from benchctl.measure.directory import reopen_experiment
from benchctl.micro.experiment import grid_of_points, resume_forward
from benchctl.micro.peaks import peak_warnings, peaks_of_device
from benchctl.profile.choices import ForwardPoint
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import verify_directory
from benchctl.records.peaks import PEAKS, hardware_of
from benchctl.report.time_tables import launch_table, passes_table

EAGER_US, GRAPH_US = 900.0, 230.0


def launch_bound(point, mode):
    return (EAGER_US if mode == "eager" else GRAPH_US) + 2.0 * point.total_new_tokens


GRID = grid_of_points(("decode", "prefill"), (5, 10), (0,), (4,))


def test_every_point_runs_in_every_mode_once_a_block_with_at_least_the_replays_that_were_asked_for(tmp_path):
    workers = FakeWorkers(launch_bound)
    outcome = measure(tmp_path, GRID, workers, replays=200)
    assert outcome.outcome.num_done == 6 * 4 * 2
    assert workers.num_started == workers.num_ended == 6
    for arm in load_experiment(outcome.path).arms:
        assert sorted(arm.runs) == list(range(6))
        assert sum(len(run.columns) for run in arm.runs.values()) >= 200
    passes = {(number, point, mode) for number, point, mode in workers.measured}
    assert Counter(number for number, _, _ in passes) == dict.fromkeys(range(1, 7), 8)
    verified = verify_directory(outcome.path, is_fresh=True)
    assert (verified.alterations, verified.num_files > 48) == ((), True)


def test_each_cell_of_a_graph_is_compared_with_the_same_cell_eager_and_launches_divided_among_operators(tmp_path):
    outcome = measure(tmp_path, GRID, FakeWorkers(launch_bound))
    pairs = baseline_pairs(load_experiment(outcome.path))
    assert len(pairs) == 4
    assert all(pair.a.cell == pair.b.cell and pair.a.variant == "eager" for pair in pairs)
    analysis = analyze_directory(outcome.path)
    by_cell = {(row.cell["phase"], row.cell["batch_size"]): row.number("step_ms_ratio") for row in analysis.sweep}
    assert by_cell["decode", 5] == pytest.approx((GRAPH_US + 10) / (EAGER_US + 10), rel=0.01)
    assert by_cell["prefill", 10] == pytest.approx((GRAPH_US + 80) / (EAGER_US + 80), rel=0.01)
    costs = [(cost.num_operators, cost.us_per_operator) for cost in analysis.launches]
    assert costs == [(31, pytest.approx((EAGER_US - GRAPH_US) / 31, rel=0.02))] * 4
    table = launch_table(analysis)
    assert [column.heading for column in table.columns][-2:] == ["operators", "µs each"]
    assert {row[-2] for row in table.texts()} == {"31"}


def test_a_result_below_the_floor_is_a_failed_run_that_counts_nowhere(tmp_path):
    def too_fast(point, mode):
        return 42.0 if mode == "graph" and point.batch_size == 5 and point.phase == "decode" else 900.0

    outcome = measure(tmp_path, GRID, FakeWorkers(too_fast, device_name=A100))
    assert len(outcome.below_floor) == 6
    for allow_suspect in (False, True):
        analysis = analyze_directory(outcome.path, allow_suspect=allow_suspect)
        refused = [run for run in analysis.runs if run.record.run_id in outcome.below_floor]
        assert {(run.record.state, run.is_usable) for run in refused} == {("failed", False)}
        assert {warning.code for run in refused for warning in run.warnings} >= {"below-floor"}
        assert not any(row.variant == "graph" and row.cell == refused[0].record.cell for row in analysis.sweep)
    assert "no such pass takes less than 42.6 µs" in refused[0].record.failure.message


def test_a_device_without_known_peaks_and_memory_that_is_handed_out_during_replays_are_told(tmp_path):
    outcome = measure(tmp_path, GRID, FakeWorkers(lambda *_: 0.1, num_allocations=4), modes=("eager",))
    results = ResultDirectory(outcome.path)
    assert outcome.below_floor == ()
    assert "floor-unknown" in {warning.code for warning in results.manifest().warnings}
    record = results.runs()[0].read()
    assert (record.state, record.effective_config["server.operators"]) == ("done", 31)
    assert [warning.code for warning in record.warnings if "4 pieces" in warning.message] == ["replays-allocate"]


def test_a_pass_without_memory_for_it_is_refused_before_anything_is_measured(tmp_path):
    workers = FakeWorkers(launch_bound, too_large=UsageError("keys and values need 4578 GiB"))
    with pytest.raises(UsageError, match="4578 GiB"):
        measure(tmp_path, GRID, workers)
    assert (workers.measured, workers.num_started, workers.num_ended) == ([], 1, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [UsageError("the cache does not fit"), KeyboardInterrupt()])
def test_what_was_measured_before_a_refusal_or_an_interrupt_is_kept_and_can_be_continued(tmp_path, error):
    workers = FakeWorkers(launch_bound, error=error, fails_at=3)
    with pytest.raises(type(error)):
        measure(tmp_path, GRID, workers)
    (path,) = (path for path in tmp_path.glob("*/*") if not path.is_symlink())
    analysis = analyze_directory(path)
    assert [run.record.state for run in analysis.runs] == ["done"] * 3 + ["failed"]
    assert analysis.results.manifest.state == ("failed" if isinstance(error, UsageError) else "interrupted")
    assert workers.num_started == workers.num_ended
    outcome = resume_forward(reopen_experiment(path, None), LISTENER, FakeWorkers(launch_bound).start)
    assert outcome.outcome.num_skipped == 3
    assert {run.record.state for run in analyze_directory(path).runs} == {"done"}


def test_a_worker_that_dies_fails_its_run_and_another_takes_over_and_measures_the_block_again(tmp_path):
    workers = FakeWorkers(launch_bound, error=RunError("the worker ended", cause="worker-died"), fails_at=2)
    outcome = measure(tmp_path, GRID, workers).outcome
    assert (outcome.num_done, outcome.num_failed) == (48, 0), "its block is measured once more"
    assert workers.num_started == workers.num_ended == 8


def test_points_of_backfill_get_the_context_and_the_new_tokens_of_their_own(tmp_path):
    decode = ForwardPoint(phase="decode", batch_size=6, context_tokens=256)
    backfill = ForwardPoint(phase="prefill", batch_size=3, new_tokens=1, context_tokens=256)
    workers = FakeWorkers(launch_bound)
    measure(tmp_path, (decode, backfill), workers, modes=("eager",), blocks=1, name="bonus")
    assert {point for _, point, _ in workers.measured} == {decode, backfill}


HOST = platform.node()
DECODE = {"points": grid_of_points(("decode",), (1,), (0,), ()), "modes": ("eager",), "blocks": 2, "replays": 4}
BELOW, ABOVE = (FakeWorkers(lambda *_, each=each: each) for each in (900.0, 2000.0))
"""Around the floor of llama-68m in 16 bits on the planted CPU: 87 MB at 49 GB/s, of which 70 % count."""


@pytest.fixture(autouse=True)
def _store(tmp_path, monkeypatch):
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))


def test_a_pass_faster_than_the_measured_peaks_allow_is_refused_also_when_it_is_resumed_with_other_peaks(tmp_path):
    PEAKS.add(cpu_peaks(host=HOST))
    outcome = measure(tmp_path / "r", workers=BELOW, **DECODE)
    slower = measure(tmp_path / "s", workers=ABOVE, **DECODE)
    assert (len(outcome.below_floor), len(slower.below_floor)) == (2, 0)
    title = passes_table(analyze_directory(slower.path)).title
    assert "floor at the peaks of the fastest rounds of amd-epyc-2-threads (peaks measured 2026-11-22" in title
    PEAKS.add(cpu_peaks(host=HOST, device="another", measured_at="2027-01-01T00:00:00Z"))
    assert PEAKS.in_results(outcome.path) == cpu_peaks(host=HOST)
    assert load_experiment(outcome.path).hardware == hardware_of(cpu_peaks())
    assert len(resume_forward(reopen_experiment(outcome.path, None), LISTENER, BELOW.start).below_floor) == 2


def test_the_fastest_round_of_measured_peaks_bounds_a_pass_and_a_data_sheet_better():
    peaks = peaks_of_device(info_of(CPU), cpu_peaks())
    assert (peaks.is_measured, peaks.cache_bytes) == (True, 32 * 2**20)
    assert (peaks.hardware.peak_flops_per_s, peaks.hardware.bandwidth_bytes_per_s) == (0.81e12, 49e9)
    of_gpu = peaks_of_device(info_of(A100), gpu_peaks())
    assert (of_gpu.is_measured, of_gpu.hardware) == (False, HARDWARE["a100-sxm"])
    assert peaks_of_device(info_of(CPU), None) is None


def test_peaks_of_a_busy_machine_bound_nothing_and_the_directory_says_so(tmp_path):
    busy = cpu_peaks(host=HOST, busy_frac=0.9)
    PEAKS.add(cpu_peaks(host=HOST, busy_frac=0.9, warnings=peak_warnings(busy)))
    outcome = measure(tmp_path / "r", workers=BELOW, **DECODE)
    warnings = {warning.code: warning.message for warning in ResultDirectory(outcome.path).manifest().warnings}
    assert outcome.below_floor == ()
    assert "while the machine was quiet" in warnings["floor-unknown"]


@pytest.fixture(name="both_modes", scope="module")
def _both_modes(tmp_path_factory):
    """Batches of 5 and 10, eager and as graphs."""
    return bonus_directory.measured(tmp_path_factory.mktemp("bonus"))


def test_the_directory_of_both_ways_gives_back_the_design_and_the_planted_costs(both_modes):
    bonus = measured_bonus(both_modes)
    (verdict,) = bonus.verdicts
    names = attrgetter("decode_mode", "prefill_mode", "batch_size", "bonus_tokens")
    design = bonus_design((5, 10), verdict.context_tokens, BOTH)
    assert [*map(names, verdict.comparisons)] == [*map(names, design)]
    for row in verdict.comparisons:
        assert (row.num_blocks, row.cheaper) == (6, "expansion")
        assert row.expansion_ns.value == pytest.approx(1000 * ROW_US * row.bonus_tokens, abs=10_000)
        truth_us = LAUNCHES_US["prefill"][row.prefill_mode] + ROW_US * row.bonus_tokens
        assert row.prefill_ns.value == pytest.approx(1000 * truth_us, rel=0.01)
    assert bonus.is_decided
    assert bonus.where.startswith("llama-68m, float16, on ")


def test_passes_that_failed_take_their_rows_with_them_and_leave_the_others(tmp_path):
    def too_fast(point, mode):
        backfill = ForwardPoint(phase="prefill", batch_size=10, context_tokens=256)
        return 0.001 if point == backfill else bonus_directory.launch_bound(point, mode)

    path = bonus_directory.measured(tmp_path, workers=FakeWorkers(too_fast, device_name="NVIDIA A100-SXM4-80GB"))
    bonus = measured_bonus(path)
    (verdict,) = bonus.verdicts
    assert {(row.batch_size, row.cheaper) for row in verdict.comparisons} == {(5, "expansion")}
    assert not bonus.is_decided
    (sentence,) = bonus.missing
    assert sentence.startswith("20 of 36 comparisons behind 256 tokens in the cache are missing, at batch 10: ")
    done = benchctl("micro", "bonus", path)
    assert (done.returncode, sentence in done.stdout) == (3, True)


def test_a_directory_of_requests_or_of_other_passes_is_refused_with_what_lacks(tmp_path):
    with pytest.raises(UsageError, match=r"holds requests to engine 'sim'.*micro bonus"):
        measured_bonus(Path("results/example"))
    backfill = ForwardPoint(phase="prefill", batch_size=3, context_tokens=64)
    outcome = measure(tmp_path, [backfill], modes=("eager",), blocks=1)
    with pytest.raises(UsageError, match="no batch size B with decodes at B and 2B"):
        measured_bonus(outcome.path)


def test_the_command_judges_a_directory_again(both_modes):
    done = benchctl("micro", "bonus", both_modes)
    assert done.returncode == 0, done.stderr
    assert "decode with graphs, prefill without graphs: batch expansion is cheaper from batch 5 on" in done.stdout
    document = json.loads(benchctl("micro", "bonus", both_modes, "--json").stdout)
    row = document["verdicts"][0]["comparisons"][0]
    difference = row["difference_ns"]
    assert row["cheaper"] == "expansion"
    assert difference["low"] < difference["centre"] < difference["high"] < 0
