"""Measured peaks as the floor of forward passes on a device without a data sheet."""

import platform

import pytest
from support.fake_passes import A100, FakeWorkers
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


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))
    return tmp_path / "peaks"


@pytest.fixture
def info():
    with FakeWorkers(lambda *_: ABOVE_US).start(None) as worker:
        return worker.info


def measured(path, pass_us):
    points = grid_of_points(("decode",), (1,), (0,), ())
    profile = forward_profile(
        points, model="llama-68m", device="cpu", dtype="float16", modes=("eager",), blocks=2, replays=4
    )
    origin = Origin(output_root=path, argv=("benchctl", "micro", "forward"))
    return measure_forward(profile, origin, LISTENER, FakeWorkers(lambda *_: pass_us).start)


def test_a_pass_faster_than_the_measured_peaks_allow_is_refused(store, tmp_path) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    outcome = measured(tmp_path / "r", BELOW_US)
    assert len(outcome.below_floor) == 2
    slower = measured(tmp_path / "s", ABOVE_US)
    assert not slower.below_floor
    table = passes_table(analyze_directory(slower.path))
    assert (
        "floor at the peaks of the fastest rounds of amd-epyc-2-threads (peaks measured 2026-11-22" in table.title
    )


def test_the_directory_has_the_peaks_that_were_used_and_reads_and_resumes_with_them(store, tmp_path) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    path = measured(tmp_path / "r", BELOW_US).path
    PEAKS.add(cpu_peaks(host=HOST, device="another", measured_at="2027-01-01T00:00:00Z"))
    assert PEAKS.in_results(path) == cpu_peaks(host=HOST)
    assert load_experiment(path).hardware == hardware_of(cpu_peaks())
    again = resume_forward(reopen_experiment(path, None), LISTENER, FakeWorkers(lambda *_: BELOW_US).start)
    assert len(again.below_floor) == 2


def test_of_measured_peaks_the_fastest_round_bounds_a_pass(info) -> None:
    peaks = peaks_of_device(info, cpu_peaks())
    assert peaks.is_measured
    assert (peaks.hardware.peak_flops_per_s, peaks.hardware.bandwidth_bytes_per_s) == (0.81e12, 49e9)
    assert peaks.cache_bytes == 32 * 2**20


def test_a_data_sheet_bounds_better_than_what_was_measured(info) -> None:
    with FakeWorkers(lambda *_: ABOVE_US, device_name=A100).start(None) as worker:
        peaks = peaks_of_device(worker.info, gpu_peaks())
    assert not peaks.is_measured
    assert peaks.hardware is HARDWARE["a100-sxm"]
    assert peaks_of_device(info, None) is None


def test_peaks_of_a_busy_machine_bound_nothing_and_the_directory_says_so(store, tmp_path) -> None:
    busy = cpu_peaks(host=HOST, busy_frac=0.9)
    PEAKS.add(cpu_peaks(host=HOST, busy_frac=0.9, warnings=peak_warnings(busy)))
    outcome = measured(tmp_path / "r", BELOW_US)
    warnings = {warning.code: warning.message for warning in ResultDirectory(outcome.path).manifest().warnings}
    assert outcome.below_floor == ()
    assert "while the machine was quiet" in warnings["floor-unknown"]
