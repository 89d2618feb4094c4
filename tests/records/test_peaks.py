"""Measured peaks: the best median of a kernel's sizes, and hardware whose name states all of them."""

import json
import platform
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import printed
from support.peaks import H100, cpu_peaks, gpu_peaks, series
from support.results.builders import edit_manifest, write_results

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.costs.hardware import HARDWARE, hardware_for
from benchctl.errors import ProfileError, RecordError, SchemaVersionError, UsageError
from benchctl.measure.on_file import peaks_on_file
from benchctl.profile.load import dump_profile, load_profile, parse_profile
from benchctl.records.files import write_json_atomic
from benchctl.records.peaks import (
    PEAKS,
    best_series,
    hardware_of,
    machine_peaks,
    named_peaks,
    newest_peaks,
    product_flops_per_s,
    resolved_hardware,
)
from benchctl.records.schema import GpuInfo, ResultWarning
from benchctl.steptime.features import all_reduce_us

RATE = st.floats(1e9, 1e16)


def test_a_peak_is_that_of_the_size_with_the_best_median_or_the_shortest_time() -> None:
    peaks = cpu_peaks()
    best = best_series(peaks, "matmul", "bfloat16")
    assert (best.setting, best.median) == ("1024", 0.8e12)
    assert product_flops_per_s(peaks, "float32") == 0.2e12
    assert best_series(peaks, "all-reduce") is None
    times = (
        series("all-reduce-time", 9e-6, 9e-6),
        series("all-reduce-time", 7e-6, 7e-6),
        series("launch", 5e-6, 5e-6, setting="in a row"),
        series("launch", 1e-6, 1e-6, setting="in a graph"),
    )
    peaks = cpu_peaks(series=(*peaks.series[:5], *times))
    assert best_series(peaks, "all-reduce-time").median == 7e-6
    assert best_series(peaks, "launch").setting == "in a row"
    assert series("read", 100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0, 500.0).spread_frac == 4 / 104


def test_measured_hardware_takes_the_faster_of_copy_and_read_and_the_memory_of_the_device() -> None:
    hardware = hardware_of(cpu_peaks())
    assert hardware.name == "amd-epyc-2-threads:0.8:48:25:measured=20261122T190501Z"
    assert (hardware.peak_flops_per_s, hardware.bandwidth_bytes_per_s) == (0.8e12, 48e9)
    assert (hardware.memory_bytes, hardware.device) == (25_000_000_000, "amd-epyc-2-threads")
    assert hardware.title == "amd-epyc-2-threads (peaks measured 2026-11-22 19:05 UTC)"
    assert hardware.source == "measured at 20261122T190501Z"
    two = hardware.times(2)
    assert (two.peak_flops_per_s, two.title) == (1.6e12, f"2 x {hardware.title}")


def test_a_gpu_of_the_table_keeps_its_name_its_faster_arithmetic_and_its_measured_link() -> None:
    hardware, sheet = hardware_of(gpu_peaks()), hardware_for("h100-sxm")
    assert gpu_peaks().device == H100
    assert (hardware.device, hardware.link_bytes_per_s) == ("h100-sxm", 390e9)
    assert hardware.peak_of("fp8") == 1500e12
    # The times of vLLM's kernels belong to the device, whatever its link was measured to reach.
    assert all_reduce_us(1e6, hardware, 4) != all_reduce_us(1e6, replace(hardware, name="a100-sxm"), 4)
    assert all_reduce_us(1e6, replace(hardware, link_bytes_per_s=450e9), 4) == all_reduce_us(1e6, sheet, 4)
    assert hardware_of(gpu_peaks(device="NVIDIA A10")).device == "nvidia-a10"
    for device in HARDWARE.values():
        assert (device.measured_at, device.title, device.device) == (None, device.name, device.name)


@settings(max_examples=40)
@given(bfloat16=RATE, read=RATE, fp8=RATE, link=RATE)
def test_the_name_of_measured_hardware_says_all_of_it_to_five_digits(bfloat16, read, fp8, link) -> None:
    hardware = hardware_of(gpu_peaks(bfloat16, read, fp8, link))
    assert hardware_for(hardware.name) == hardware
    pairs = (
        (hardware.peak_flops_per_s, bfloat16),
        (hardware.bandwidth_bytes_per_s, max(read, 2.9e12)),
        (hardware.peak_of("fp8"), max(fp8, bfloat16)),
        (hardware.link_bytes_per_s, link),
    )
    assert all(stated == pytest.approx(measured, rel=1e-4) for stated, measured in pairs)


def test_stated_peaks_with_parts_that_mean_nothing_are_refused() -> None:
    for text in ("1:2:measured=today", "1:2:fp7=3", "1:2:fp8=0", "1:2:link=fast", "1:fp8=3:measured="):
        with pytest.raises(UsageError, match="give a name and two positive numbers"):
            hardware_for(f"cpu:{text}")
    with pytest.raises(UsageError, match="'measured' once 'benchctl micro roofline' has measured them"):
        hardware_for("measured")


def test_peaks_of_a_directory_are_read_as_they_were_written(tmp_path) -> None:
    assert PEAKS.in_results(tmp_path) is None
    write_json_atomic(tmp_path / PEAKS.file, gpu_peaks())
    assert PEAKS.in_results(tmp_path) == gpu_peaks()


def test_damaged_newer_and_incomplete_peaks_are_refused_with_a_remedy(tmp_path) -> None:
    path, document = tmp_path / PEAKS.file, msgspec.to_builtins(cpu_peaks())
    for content, error, problem in (
        ("{", RecordError, "remove the file, or measure with 'benchctl micro roofline'"),
        (json.dumps(document | {"schema_version": 99}), SchemaVersionError, "99"),
        (json.dumps(document | {"series": document["series"][3:]}), RecordError, "no product of bfloat16, float16"),
        (json.dumps(document | {"series": document["series"][:3]}), RecordError, "neither a copy nor a read was"),
    ):
        path.write_text(content)
        with pytest.raises(error, match=problem):
            PEAKS.read(path)


HOST = platform.node()
OLD, NEW = "2026-11-20T08:00:00Z", "2026-11-22T19:05:01Z"


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))
    return tmp_path / "peaks"


def test_the_newest_peaks_of_a_device_count_unless_the_machine_was_busy_or_the_file_is_damaged(store) -> None:
    warning = ResultWarning(code="peak-on-busy-machine", message="other programs used the cores")
    busy = PEAKS.add(cpu_peaks(measured_at=NEW, warnings=(warning,)))
    assert [peaks.measured_at for peaks in newest_peaks()] == [NEW]
    assert PEAKS.add(cpu_peaks(measured_at=OLD)) == PEAKS.add(cpu_peaks(measured_at=OLD))
    assert [peaks.measured_at for peaks in newest_peaks()] == [OLD]
    assert [entry.content.measured_at for entry in PEAKS.entries()] == [NEW, OLD]
    busy.write_text("{")
    newest, older = PEAKS.entries()
    assert (newest.content, "remove the file" in newest.problem) == (None, True)
    assert newest_peaks() == [older.content]
    PEAKS.add(cpu_peaks(measured_at=NEW))
    assert [peaks.measured_at for peaks in newest_peaks()] == [NEW]
    PEAKS.add(cpu_peaks(threads=1))
    assert len(newest_peaks()) == 2, "other threads have a key of their own"
    assert cpu_peaks().key.startswith("box-amd-epyc-2-threads-")


def test_a_machine_is_meant_to_be_its_gpu_and_a_name_says_which_device(store) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    assert named_peaks(None).kind == "cpu"
    PEAKS.add(gpu_peaks(host=HOST))
    named = {None: "cuda", "amd-epyc-2-threads": "cpu", H100: "cuda", f"{HOST}-amd": "cpu"}
    assert {name: named_peaks(name).kind for name in named} == named
    assert machine_peaks([H100, H100]) == gpu_peaks(host=HOST)
    assert machine_peaks([H100, "NVIDIA H200"]) is None, "several kinds of GPU are none"


def test_the_word_measured_is_a_name_that_states_the_peaks_or_refused_with_what_is_on_file(store) -> None:
    remedy = r"nothing is there.*'benchctl micro roofline' measures them"
    with pytest.raises(UsageError, match=remedy):
        resolved_hardware("measured")
    PEAKS.add(cpu_peaks())
    with pytest.raises(UsageError, match=r"no measured peaks of .* are on file.*box-amd-epyc-2-threads"):
        resolved_hardware("measured")
    PEAKS.add(cpu_peaks(threads=1))
    for name, problem in (
        ("measured:tpu", "no measured peaks named 'tpu'"),
        ("measured:box", r"those of several devices: .*write measured:KEY"),
    ):
        with pytest.raises(UsageError, match=problem):
            resolved_hardware(name)
    PEAKS.add(cpu_peaks(host=HOST))
    names = {"measured": hardware_of(cpu_peaks()).name, f"measured:{HOST}": hardware_of(cpu_peaks()).name}
    names |= {name: name for name in ("h100-sxm", "cpu:1.5:80", "measured:1.5:80", "nothing")}
    assert {name: resolved_hardware(name) for name in names} == names


def test_a_profile_that_says_measured_states_the_peaks_and_one_that_does_not_stays_the_same(store) -> None:
    with pytest.raises(ProfileError, match=r"hardware: no measured peaks .*'benchctl micro roofline'"):
        load_profile("ci-smoke", overrides=["hardware=measured"])
    before = dump_profile(load_profile("ci-smoke"))
    PEAKS.add(cpu_peaks(host=HOST))
    assert dump_profile(load_profile("ci-smoke")) == before
    assert peaks_on_file(load_profile("ci-smoke"), []) is None
    profile = load_profile("ci-smoke", overrides=["hardware=measured", "engine.options.hardware=measured"])
    name = hardware_of(cpu_peaks()).name
    assert (profile.hardware, profile.engine.options["hardware"]) == (name, name)
    assert parse_profile(dump_profile(profile), "stored").hardware == name, "without the store too"
    assert peaks_on_file(profile, []) == cpu_peaks(host=HOST)


def test_a_real_engine_on_this_machine_gets_its_peaks_unless_the_profile_states_other_hardware(store) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    PEAKS.add(gpu_peaks(host=HOST))
    profile = load_profile("ci-smoke", engine="transformers")
    assert peaks_on_file(profile, []).kind == "cpu"
    assert peaks_on_file(profile, [H100]).kind == "cuda"
    assert peaks_on_file(load_profile("ci-smoke", engine="transformers", overrides=["hardware=l4"]), [H100]) is None


def results_with(path, peaks, *gpus):
    results = write_results(path, block_factors=({"baseline": 1.0, "guided": 1.0},))
    edit_manifest(results, engine="vllm", gpus=tuple(GpuInfo(index=i, name=name) for i, name in enumerate(gpus)))
    if peaks is not None:
        write_json_atomic(results.path / PEAKS.file, peaks)
    return results.path


def test_a_directory_is_compared_with_its_own_peaks_whatever_is_on_file(store, tmp_path) -> None:
    PEAKS.add(cpu_peaks(host=HOST, measured_at="2027-01-01T00:00:00Z"))
    assert load_experiment(results_with(tmp_path / "cpu", cpu_peaks())).hardware == hardware_of(cpu_peaks())
    path = results_with(tmp_path / "gpu", gpu_peaks(), H100)
    assert load_experiment(path).hardware.peak_flops_per_s == 790e12
    assert load_experiment(results_with(tmp_path / "s", None, H100)).hardware.peak_flops_per_s == 989.4e12
    (path / PEAKS.file).write_text("{")
    experiment = load_experiment(path)
    assert [warning.code for warning in experiment.warnings] == ["peaks-unreadable"]
    assert experiment.hardware.peak_flops_per_s == 989.4e12


def test_flops_takes_measured_peaks_and_says_when_they_were_measured(store) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    measured = printed("flops", "--wall", "10", "--hardware", "measured")
    assert "% of amd-epyc-2-threads's peak" in measured
    assert "peak: 0.8000 TFLOP/s, amd-epyc-2-threads (peaks measured 2026-11-22 19:05 UTC)" in measured
    sheet = printed("flops", "--wall", "10")
    assert "peak: 989.4 TFLOP/s, NVIDIA H100 data sheet and architecture white paper" in sheet


def test_a_simulation_with_measured_peaks_is_slower_than_one_with_the_data_sheet_and_its_directory_says_so(
    store, tmp_path
) -> None:
    PEAKS.add(gpu_peaks(host=HOST))
    step_s = {}
    for hardware in ("measured", "h100-sxm"):
        settings = ("cost_model=roofline", f"hardware={hardware}")
        words = [word for setting in settings for word in ("--set", f"engine.options.{setting}")]
        path = tmp_path / hardware
        printed("simulate", "--profile", "ci-smoke", "--engine", "sim", "--blocks", "1", *words, "-o", path)
        experiment = load_experiment(path)
        step_s[hardware] = experiment.metrics(experiment.results.runs[0])["step_ms"]
        is_told = "measured=2026" in (path / "profile.yaml").read_text()
        assert (path / PEAKS.file).is_file() == is_told == (hardware == "measured")
    assert step_s["measured"] > step_s["h100-sxm"]
