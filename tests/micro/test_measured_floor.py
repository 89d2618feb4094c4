"""Measured peaks as the floor of forward passes on a device without a data sheet."""

import platform

import pytest
from support.fake_passes import A100, CPU, FakeWorkers, info_of
from support.peaks import cpu_peaks, gpu_peaks

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.costs.hardware import HARDWARE
from benchctl.measure.directory import Origin, reopen_experiment
from benchctl.measure.experiment import Listener
from benchctl.measure.measured_run import ignore
from benchctl.micro.experiment import measure_forward, resume_forward
from benchctl.micro.peaks import peak_warnings, peaks_of_device
from benchctl.micro.points import forward_profile, grid_of_points
from benchctl.records.directory import ResultDirectory
from benchctl.records.peaks import PEAKS, hardware_of
from benchctl.report.time_tables import passes_table

LISTENER = Listener(on_run_start=ignore, on_request_end=ignore, on_run_end=ignore, on_log_line=ignore)
HOST = platform.node()
BELOW_US, ABOVE_US = 900.0, 2000.0
"""Around the floor of llama-68m in 16 bits on the planted CPU: 87 MB at 49 GB/s, of which 70 % count."""


@pytest.fixture(autouse=True)
def _store(tmp_path, monkeypatch):
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))


def measured(path, pass_us):
    how = {"device": "cpu", "dtype": "float16", "modes": ("eager",), "blocks": 2, "replays": 4}
    profile = forward_profile(grid_of_points(("decode",), (1,), (0,), ()), model="llama-68m", **how)
    origin = Origin(output_root=path, argv=("benchctl", "micro", "forward"))
    return measure_forward(profile, origin, LISTENER, FakeWorkers(lambda *_: pass_us).start)


def test_a_pass_faster_than_the_measured_peaks_allow_is_refused_also_when_it_is_resumed_with_other_peaks(tmp_path):
    PEAKS.add(cpu_peaks(host=HOST))
    outcome = measured(tmp_path / "r", BELOW_US)
    slower = measured(tmp_path / "s", ABOVE_US)
    assert (len(outcome.below_floor), len(slower.below_floor)) == (2, 0)
    title = passes_table(analyze_directory(slower.path)).title
    assert "floor at the peaks of the fastest rounds of amd-epyc-2-threads (peaks measured 2026-11-22" in title
    PEAKS.add(cpu_peaks(host=HOST, device="another", measured_at="2027-01-01T00:00:00Z"))
    assert PEAKS.in_results(outcome.path) == cpu_peaks(host=HOST)
    assert load_experiment(outcome.path).hardware == hardware_of(cpu_peaks())
    start = FakeWorkers(lambda *_: BELOW_US).start
    assert len(resume_forward(reopen_experiment(outcome.path, None), LISTENER, start).below_floor) == 2


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
    outcome = measured(tmp_path / "r", BELOW_US)
    warnings = {warning.code: warning.message for warning in ResultDirectory(outcome.path).manifest().warnings}
    assert outcome.below_floor == ()
    assert "while the machine was quiet" in warnings["floor-unknown"]
