"""What is on file of a machine: the noise of its servers and its measured peaks; the newest counts."""

import datetime as dt
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from support.cli import in_process, printed
from support.peaks import H100, cpu_peaks, gpu_peaks, series
from support.results.builders import PROFILE_YAML, edit_manifest, edit_run, write_results

from benchctl.analysis.compare.decide import minimum_detectable_effect
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning import noise_of_experiment, power_lines, sound_noise
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.validity.machines import age_days, noise_warnings, version_warning
from benchctl.costs.hardware import hardware_for
from benchctl.errors import NotComparableError, ProfileError, RecordError, SchemaVersionError, UsageError
from benchctl.measure.on_file import earlier_noise, keep_noise, noise_on_file, peaks_on_file
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.load import dump_profile, engine_sha256, load_profile, parse_profile
from benchctl.records.directory import ResultDirectory
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
from benchctl.records.stores import NOISE, MetricNoise, NoiseFloor, newest_of_each, remove_files
from benchctl.steptime.features import all_reduce_us
from benchctl.units import percentage

SCATTER = (0.01, -0.012, 0.004, -0.007, 0.013, -0.008, 0.002, 0.006)
SAME_SERVER = PROFILE_YAML.split("variants:", maxsplit=1)[0] + "variants:\n  baseline: {}\n  guided: {}\n"
"""The profile of the built results, with two names for one server."""
LAW = 10 / 15.5
"""Makes a guided step of the built results as long as one of the baseline."""


HOST = platform.node()


def floor(**changes: Any) -> NoiseFloor:
    fields: dict[str, Any] = {
        "schema_version": 3,
        "measured_at": "2026-11-01T12:00:00Z",
        "source": "/measured/aa",
        "host": "box",
        "engine": "vllm",
        "engine_sha256": "e" * 64,
        "engine_version": "0.12.0",
        "model": "qwen2.5-7b",
        "request_set_sha256": "0" * 64,
        "metrics": {"step_ms": MetricNoise(log_sd=0.012, num_blocks=8, floor_frac=0.021)},
    }
    return NoiseFloor(**{**fields, **changes})


def a_against_a(path: Path, scatter: tuple[float, ...] = SCATTER) -> ResultDirectory:
    """A finished A/A experiment whose second name scatters around the first."""
    factors = [{"baseline": 1.0, "guided": LAW * (1 + noise)} for noise in scatter]
    results = write_results(path, block_factors=factors, cells=[{}])
    results.write_profile(SAME_SERVER)
    return results


@pytest.fixture(autouse=True, name="store")
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))
    monkeypatch.setenv(NOISE.variable, str(tmp_path / "store"))
    return tmp_path / "store"


def test_the_newest_measurement_of_a_key_counts_older_ones_stay_and_the_same_again_is_the_same_file(
    store: Path,
) -> None:
    for day in ("03", "01", "02", "02"):
        path = NOISE.add(floor(measured_at=f"2026-11-{day}T12:00:00Z"))
    entries = NOISE.entries()
    assert [e.content.measured_at[8:10] for e in entries if e.content] == ["03", "02", "01"]
    (newest,) = newest_of_each(entries)
    assert newest.content == floor(measured_at="2026-11-03T12:00:00Z")
    remove_files(NOISE.find(f"{path.parent.name}/{path.stem}"))
    assert len(NOISE.entries()) == 2
    remove_files(NOISE.find(path.parent.name))
    assert list(store.iterdir()) == []


def test_noise_is_that_of_one_host_with_its_devices_and_one_server_with_its_model() -> None:
    NOISE.add(floor())
    others = (
        {"host": "b"},
        {"gpus": ("H100",)},
        {"engine": "sim"},
        {"engine_sha256": "f" * 64},
        {"model": "llama"},
    )
    for number, other in enumerate(others, start=2):
        NOISE.add(floor(**other))
        assert len(newest_of_each(NOISE.entries())) == number
        assert len(NOISE.entries(floor(**other).key)) == 1
    assert NOISE.find("box-vllm-ll")[0].content == floor(model="llama")
    for name, problem in (("box-vllm", "several keys"), ("nowhere", "known keys")):
        with pytest.raises(UsageError, match=problem):
            NOISE.find(name)


def test_noise_on_file_is_that_of_the_same_options_and_a_damaged_file_hides_no_older_one_and_is_told() -> None:
    exact, noisy, a_a = (
        load_profile(name, engine=engine)
        for name, engine in (("topk-sweep", "sim-exact"), ("topk-sweep", "sim"), ("aa", "sim-exact"))
    )
    server = {"engine": "sim", "engine_sha256": engine_sha256(exact), "model": exact.model}
    stored = floor(host=HOST, gpus=tuple(gpu.name for gpu in gpu_inventory()), **server)
    NOISE.add(stored)
    newer = NOISE.add(msgspec.structs.replace(stored, measured_at="2026-12-01T00:00:00Z"))
    newer.write_text("{}")
    noise, (warning,) = noise_on_file(exact)
    assert (noise, str(newer) in warning.message) == (stored, True)
    assert noise_on_file(noisy)[0] is None
    assert noise_on_file(a_a)[0] is None, "it measures noise, and takes none along"
    assert "scatter by 2%: this experiment measures it" in power_lines(a_a, None)[1]


def test_an_experiment_of_one_server_is_stored_with_scatter_and_floor(tmp_path: Path, store: Path) -> None:
    assert isinstance(keep_noise(a_against_a(tmp_path / "aa").path, parse_profile(SAME_SERVER, "built")), Path)
    (entry,) = NOISE.entries()
    step = entry.content.metrics["step_ms"]
    interval = estimate_paired([float(x) for x in SCATTER]).log_interval
    assert step.num_blocks == 8
    assert step.floor_frac == pytest.approx(max(map(abs, interval)), rel=0.05)
    assert step.log_sd == pytest.approx(0.0095, rel=0.1)


def test_nothing_is_stored_of_runs_that_are_not_done_of_too_few_blocks_or_of_different_servers(
    tmp_path: Path,
) -> None:
    results, same_server = a_against_a(tmp_path / "aa"), parse_profile(SAME_SERVER, "built")
    for state in ("suspect", "failed"):
        edit_run(results, results.plan().runs[3].run_id, state=state)
        reason = str(keep_noise(results.path, same_server))
        assert f"1 of 16 runs of {results.path} are not done" in reason
    assert "at least 6" in str(keep_noise(a_against_a(tmp_path / "few", SCATTER[:5]).path, same_server))
    other = write_results(tmp_path / "other")
    assert keep_noise(other.path, parse_profile(PROFILE_YAML, "built")) is None
    with pytest.raises(NotComparableError, match="not an A/A experiment"):
        sound_noise(load_experiment(other.path))
    assert NOISE.entries() == ()


def test_without_an_a_a_a_plan_takes_the_scatter_of_the_newest_result_of_this_server(tmp_path: Path) -> None:
    results, profile = a_against_a(tmp_path / "built" / "latest"), parse_profile(SAME_SERVER, "built")
    assert earlier_noise(profile, tmp_path) is None, "measured on another machine"
    edit_manifest(results, host=msgspec.structs.replace(results.manifest().host, hostname=HOST))
    noise = earlier_noise(profile, tmp_path)
    assert noise is not None
    assert noise.metrics["step_ms"].log_sd == pytest.approx(0.0095, rel=0.1)
    assert {metric.floor_frac for metric in noise.metrics.values()} == {0.0}, "changes tell nothing about a floor"
    eight = profile.model_copy(update={"blocks": 8})
    assert f"% (measured on {noise.measured_at[:10]} in {results.path}" in power_lines(eight, noise)[1]
    other = profile.model_copy(update={"model": "qwen2.5-0.5b"})
    assert earlier_noise(other, tmp_path) is earlier_noise(profile, tmp_path / "none") is None


def test_noise_of_another_workload_or_of_long_ago_or_of_another_version_is_doubted(tmp_path: Path) -> None:
    results = a_against_a(tmp_path / "aa")
    noise = noise_of_experiment(load_experiment(results.path))
    assert doubts_of(noise, results) == ()
    edit_manifest(results, created_at="2026-01-31T23:59:59Z")
    assert doubts_of(noise, results) == ()
    edit_manifest(results, created_at="2026-02-02T00:00:00Z", request_set_sha256="a" * 64)
    assert [warning.code for warning in doubts_of(noise, results)] == ["noise-of-another-workload", "noise-old"]
    with_version = msgspec.structs.replace(noise, engine_version="1")
    assert version_warning(with_version, "1") is version_warning(with_version, None) is None
    assert "1, and this is 2" in version_warning(with_version, "2").message
    assert age_days(floor(), dt.datetime(2026, 11, 4, 11, 59, tzinfo=dt.UTC)) == 2, "whole days"


def doubts_of(noise: NoiseFloor, results: ResultDirectory) -> tuple[ResultWarning, ...]:
    manifest = results.manifest()
    return noise_warnings(noise, manifest.request_set_sha256, manifest.created_at)


def test_a_plan_says_what_the_noise_on_file_lets_it_show_or_what_it_assumes() -> None:
    power_line, origin, needed = power_lines(load_profile("topk-sweep", blocks=8), floor())
    detectable = minimum_detectable_effect(0.012, 8, num_tests=15, margin_frac=0.021, estimator="mean")
    assert power_line.startswith(f"8 blocks detect a change of ±{percentage(detectable, 2)} in step_ms; ")
    assert power_line.endswith(" in 4 of 5 experiments (power 80%, corrected for 15 tests)")
    assert origin == (
        "this rests on blocks that scatter by 1.2% (measured on 2026-11-01 in /measured/aa; 2% assumed for "
        "tpot_ms, wall_s)"
    )
    assert needed.startswith("a change of 2% (twice the margin) in tpot_ms: about ")
    assert power_lines(load_profile("topk-sweep"), None)[1] == (
        "this assumes that blocks scatter by 2%: neither an A/A nor an earlier result of this server is on file"
    )
    early, *_ = power_lines(load_profile("topk-sweep", blocks=8, overrides=["stopping.precision=0.01"]), floor())
    shown = [float(line.partition("±")[2].partition("%")[0]) for line in (power_line, early)]
    assert shown[0] < shown[1], "a rule that may end early shows less with the same blocks"
    screening = power_lines(load_profile("topk-sweep", blocks=2), floor())
    assert screening == ("a screening: 2 blocks give no verdict; at least 6 are needed",)


def test_the_commands_add_list_show_and_remove(tmp_path: Path) -> None:
    def output_of(*args: str) -> str:
        return in_process("noise", *args)[1]

    path = str(a_against_a(tmp_path / "aa").path)
    assert "no noise yet" in output_of("list")
    assert "stored: host-sim-qwen2.5-7b-" in output_of("add", path)
    assert "2026-01-01T00:00:00Z" in output_of("list")
    (listed,) = json.loads(output_of("list", "--json"))["noise"]
    assert listed["metrics"]["step_ms"]["num_blocks"] == 8
    assert listed["age_days"] > 0
    assert "step_ms" in output_of("show", listed["key"])
    assert json.loads(output_of("show", path, "--json"))["metrics"] == listed["metrics"]
    assert "removed 1 measurement" in output_of("remove", listed["key"])
    assert NOISE.entries() == ()
    code, _, message = in_process("noise", "show", write_results(tmp_path / "other").path)
    assert (code, "has no noise: none was on file" in message) == (2, True)


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
    numbers = (hardware.peak_flops_per_s, hardware.bandwidth_bytes_per_s, hardware.memory_bytes)
    assert numbers == (0.8e12, 48e9, 25_000_000_000)
    assert hardware.title == "amd-epyc-2-threads (peaks measured 2026-11-22 19:05 UTC)"
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


OLD, NEW = "2026-11-20T08:00:00Z", "2026-11-22T19:05:01Z"


def test_the_newest_peaks_of_a_device_count_unless_the_machine_was_busy_or_the_file_is_damaged() -> None:
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
    PEAKS.add(cpu_peaks(threads=1))
    assert len(newest_peaks()) == 2, "other threads have a key of their own"


def test_a_machine_is_meant_to_be_its_gpu_and_a_name_says_which_device() -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    assert named_peaks(None).kind == "cpu"
    PEAKS.add(gpu_peaks(host=HOST))
    named = {None: "cuda", "amd-epyc-2-threads": "cpu", H100: "cuda", f"{HOST}-amd": "cpu"}
    assert {name: named_peaks(name).kind for name in named} == named
    assert machine_peaks([H100, H100]) == gpu_peaks(host=HOST)
    assert machine_peaks([H100, "NVIDIA H200"]) is None, "several kinds of GPU are none"


def test_the_word_measured_is_a_name_that_states_the_peaks_or_refused_with_what_is_on_file() -> None:
    with pytest.raises(UsageError, match=r"nothing is there.*'benchctl micro roofline' measures them"):
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


def test_a_profile_that_says_measured_states_the_peaks_and_one_that_does_not_stays_the_same() -> None:
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


def test_a_real_engine_on_this_machine_gets_its_peaks_unless_the_profile_states_other_hardware() -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    PEAKS.add(gpu_peaks(host=HOST))
    profile = load_profile("ci-smoke", engine="transformers")
    assert peaks_on_file(profile, []).kind == "cpu"
    assert peaks_on_file(profile, [H100]).kind == "cuda"
    assert peaks_on_file(load_profile("ci-smoke", engine="transformers", overrides=["hardware=l4"]), [H100]) is None


def results_with(path, peaks, *gpus):
    results = write_results(path, block_factors=({"baseline": 1.0, "guided": 1.0},))
    edit_manifest(results, engine="vllm", gpus=tuple(GpuInfo(index=0, name=name) for name in gpus))
    if peaks is not None:
        write_json_atomic(results.path / PEAKS.file, peaks)
    return results.path


def test_a_directory_is_compared_with_its_own_peaks_whatever_is_on_file(tmp_path) -> None:
    PEAKS.add(cpu_peaks(host=HOST, measured_at="2027-01-01T00:00:00Z"))
    assert load_experiment(results_with(tmp_path / "cpu", cpu_peaks())).hardware == hardware_of(cpu_peaks())
    path = results_with(tmp_path / "gpu", gpu_peaks(), H100)
    assert load_experiment(path).hardware.peak_flops_per_s == 790e12
    assert load_experiment(results_with(tmp_path / "s", None, H100)).hardware.peak_flops_per_s == 989.4e12
    (path / PEAKS.file).write_text("{")
    experiment = load_experiment(path)
    assert [warning.code for warning in experiment.warnings] == ["peaks-unreadable"]
    assert experiment.hardware.peak_flops_per_s == 989.4e12


def test_a_simulation_takes_measured_peaks_and_its_directory_says_so(tmp_path) -> None:
    PEAKS.add(gpu_peaks(host=HOST))
    options = ("engine.options.cost_model=roofline", "engine.options.hardware=measured")
    words = [word for option in options for word in ("--set", option)]
    printed("simulate", "--profile", "ci-smoke", "--engine", "sim", "--blocks", "1", *words, "-o", tmp_path / "r")
    assert "measured=2026" in (tmp_path / "r" / "profile.yaml").read_text()
    assert PEAKS.in_results(tmp_path / "r") == gpu_peaks(host=HOST)
