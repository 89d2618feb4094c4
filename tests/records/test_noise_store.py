"""The noise on file: stored by what it is the noise of, newest first, and never in the way of a measurement."""

import datetime as dt
import json
import platform
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import in_process
from support.results.builders import PROFILE_YAML, edit_manifest, edit_run, write_results

from benchctl.analysis.compare.decide import minimum_detectable_effect
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning import engine_sha256, noise_of_experiment, power_lines
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.validity.machines import age_days, noise_warnings, version_warning
from benchctl.errors import NotComparableError, UsageError
from benchctl.measure.on_file import keep_noise, noise_on_file, sound_noise
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.load import load_profile, parse_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.schema import ResultWarning
from benchctl.records.stores import NOISE, MetricNoise, NoiseFloor, newest_of_each, remove_files
from benchctl.units import percentage

SCATTER = (0.01, -0.012, 0.004, -0.007, 0.013, -0.008, 0.002, 0.006)
SAME_SERVER = PROFILE_YAML.split("variants:", maxsplit=1)[0] + "variants:\n  baseline: {}\n  guided: {}\n"
"""The profile of the built results, with two names for one server."""
LAW = 10 / 15.5
"""Makes a guided step of the built results as long as one of the baseline."""


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


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def noise_of_machine() -> NoiseFloor:
    """Noise of this machine for sim-exact, stored."""
    profile = load_profile("topk-sweep", engine="sim-exact")
    gpus = tuple(gpu.name for gpu in gpu_inventory())
    server = {"engine": "sim", "engine_sha256": engine_sha256(profile), "model": profile.model}
    noise = floor(host=platform.node(), gpus=gpus, **server)
    NOISE.add(noise)
    return noise


def test_noise_on_file_is_that_of_the_same_options_and_a_damaged_file_hides_no_older_one_and_is_told() -> None:
    exact, noisy, a_a = (
        load_profile(name, engine=engine)
        for name, engine in (("topk-sweep", "sim-exact"), ("topk-sweep", "sim"), ("aa", "sim-exact"))
    )
    stored = noise_of_machine()
    newer = NOISE.add(msgspec.structs.replace(stored, measured_at="2026-12-01T00:00:00Z"))
    newer.write_text("{}")
    on_file = noise_on_file(exact)
    (warning,) = on_file.warnings
    assert (on_file.noise, str(newer) in warning.message) == (stored, True)
    assert noise_on_file(noisy).noise is None
    assert noise_on_file(a_a).noise is None, "it measures noise, and takes none along"
    assert "(assumed: this experiment measures it)" in power_lines(a_a, None)[0]


def test_an_experiment_of_one_server_is_stored_with_scatter_and_floor(tmp_path: Path, store: Path) -> None:
    assert isinstance(keep_noise(a_against_a(tmp_path / "aa").path, parse_profile(SAME_SERVER, "built")), Path)
    (entry,) = NOISE.entries()
    assert entry.content is not None
    step = entry.content.metrics["step_ms"]
    low, high = estimate_paired([float(x) for x in SCATTER]).log_interval or (0.0, 0.0)
    assert step.num_blocks == 8
    assert step.floor_frac == pytest.approx(max(abs(low), abs(high)), rel=0.05)
    assert entry.content.metrics["step_ms"].log_sd == pytest.approx(0.0095, rel=0.1)


def test_nothing_is_stored_of_runs_that_are_not_done_of_too_few_blocks_or_of_different_servers(
    tmp_path: Path,
) -> None:
    results, same_server = a_against_a(tmp_path / "aa"), parse_profile(SAME_SERVER, "built")
    for state in ("suspect", "failed"):
        edit_run(results, results.plan().runs[3].run_id, state=state)
        reason = str(keep_noise(results.path, same_server))
        assert f"1 of 16 runs of {results.path} are not done" in reason
        assert "--resume" in reason
    assert "at least 6" in str(keep_noise(a_against_a(tmp_path / "few", SCATTER[:5]).path, same_server))
    other = write_results(tmp_path / "other")
    assert keep_noise(other.path, parse_profile(PROFILE_YAML, "built")) is None
    with pytest.raises(NotComparableError, match="not an A/A experiment"):
        sound_noise(load_experiment(other.path))
    assert NOISE.entries() == ()


def test_noise_of_another_workload_or_of_long_ago_or_of_another_version_is_doubted(tmp_path: Path) -> None:
    results = a_against_a(tmp_path / "aa")
    noise = noise_of_experiment(load_experiment(results.path))
    assert doubts_of(noise, results) == ()
    edit_manifest(results, created_at="2026-01-31T23:59:59Z")
    assert doubts_of(noise, results) == ()
    edit_manifest(results, created_at="2026-02-02T00:00:00Z", request_set_sha256="a" * 64)
    assert [warning.code for warning in doubts_of(noise, results)] == ["noise-of-another-workload", "noise-old"]
    with_version = msgspec.structs.replace(noise, engine_version="1")
    assert version_warning(with_version, "1") is None
    assert version_warning(with_version, None) is None
    warning = version_warning(with_version, "2")
    assert warning is not None
    assert "1, and this is 2" in warning.message
    assert age_days(floor(), dt.datetime(2026, 11, 4, 11, 59, tzinfo=dt.UTC)) == 2, "whole days"


def doubts_of(noise: NoiseFloor, results: ResultDirectory) -> tuple[ResultWarning, ...]:
    manifest = results.manifest()
    return noise_warnings(noise, manifest.request_set_sha256, manifest.created_at)


def test_a_plan_says_what_the_noise_on_file_lets_it_show_or_what_it_assumes() -> None:
    power_line, needed = power_lines(load_profile("topk-sweep", blocks=8), floor())
    detectable = minimum_detectable_effect(0.012, 8, num_tests=15, margin_frac=0.021, estimator="mean")
    for text in (
        "with 8 blocks, 15 corrected tests and a scatter of 1.2% between blocks (A/A of 2026-11-01",
        "2% assumed for tpot_ms, wall_s",
        f"a change of ±{percentage(detectable, 2)} in step_ms; ",
        "with a power of 80%",
    ):
        assert text in power_line
    assert "blocks" in needed
    assert "(assumed: no A/A on file)" in power_lines(load_profile("topk-sweep"), None)[0]
    screening = power_lines(load_profile("topk-sweep", blocks=2), floor())
    assert screening == ("a screening: 2 blocks give no verdict; at least 6 are needed",)


def test_a_rule_that_may_end_early_shows_less_with_the_same_blocks() -> None:
    changes = []
    for overrides in ([], ["stopping.precision=0.01"]):
        line, *_ = power_lines(load_profile("topk-sweep", blocks=12, overrides=overrides), floor())
        changes.append(float(line.partition("±")[2].partition("%")[0]))
    assert changes[0] < changes[1]


def test_the_commands_add_list_show_and_remove(tmp_path: Path) -> None:
    def output_of(*args: str) -> str:
        code, out, err = in_process("noise", *args)
        assert code == 0, err
        return out

    path = str(a_against_a(tmp_path / "aa").path)
    assert "no noise yet" in output_of("list")
    assert "stored: host-sim-qwen2.5-7b-" in output_of("add", path)
    assert "2026-01-01T00:00:00Z" in output_of("list")
    (listed,) = json.loads(output_of("list", "--json"))["noise"]
    assert listed["metrics"]["step_ms"]["num_blocks"] == 8
    assert listed["age_days"] > 0
    table = output_of("show", listed["key"])
    assert [text for text in ("floor", "step_ms", path) if text not in table] == []
    assert json.loads(output_of("show", path, "--json"))["metrics"] == listed["metrics"]
    assert "removed 1 measurement" in output_of("remove", listed["key"])
    assert NOISE.entries() == ()
    code, _, message = in_process("noise", "show", write_results(tmp_path / "other").path)
    assert (code, "has no noise: none was on file" in message) == (2, True)
