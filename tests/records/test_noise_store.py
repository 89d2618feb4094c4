"""The noise on file: stored by what it is the noise of, newest first, and never in the way of a measurement."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.results.builders import PROFILE_YAML, edit_manifest, edit_run, write_results
from typer.testing import CliRunner

from benchctl.analysis.compare.decide import minimum_detectable_effect
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning import noise_of_experiment, power_lines
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.validity.machines import age_days, noise_warnings, version_warning
from benchctl.cli.app import app
from benchctl.errors import NotComparableError, UsageError
from benchctl.measure.on_file import keep_noise, noise_on_file, sound_noise
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


def test_the_newest_measurement_of_a_key_counts_and_older_ones_stay(store: Path) -> None:
    for day in ("03", "01", "02"):
        NOISE.add(floor(measured_at=f"2026-11-{day}T12:00:00Z"))
    entries = NOISE.entries()
    assert [e.content.measured_at[8:10] for e in entries if e.content] == ["03", "02", "01"]
    (newest,) = newest_of_each(entries)
    assert newest.content == floor(measured_at="2026-11-03T12:00:00Z")


def test_the_same_measurement_again_is_the_same_file(store: Path) -> None:
    assert NOISE.add(floor()) == NOISE.add(floor())
    assert len(NOISE.entries()) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"host": "b"},
        {"gpus": ("H100",)},
        {"engine": "sim"},
        {"engine_sha256": "f" * 64},
        {"model": "dir/qwen2.5-7b"},
    ],
)
def test_noise_is_that_of_one_host_with_its_devices_and_one_server_with_its_model(
    store: Path, other: dict[str, Any]
) -> None:
    NOISE.add(floor())
    NOISE.add(floor(**other))
    assert len(newest_of_each(NOISE.entries())) == 2
    assert len(NOISE.entries(floor(**other).key)) == 1


def test_a_key_can_be_named_by_its_beginning_unless_several_begin_so(store: Path) -> None:
    NOISE.add(floor())
    NOISE.add(floor(model="llama"))
    assert NOISE.find("box-vllm-ll")[0].content == floor(model="llama")
    with pytest.raises(UsageError, match="several keys"):
        NOISE.find("box-vllm")
    with pytest.raises(UsageError, match="known keys"):
        NOISE.find("nowhere")


def test_removing_one_measurement_leaves_the_others(store: Path) -> None:
    first, second = (NOISE.add(floor(measured_at=f"2026-11-0{day}T12:00:00Z")) for day in (1, 2))
    remove_files(NOISE.find(f"{second.parent.name}/{second.stem}"))
    assert first.exists()
    remove_files(NOISE.find(first.parent.name))
    assert list(store.iterdir()) == []


def test_a_damaged_file_hides_no_older_one_and_is_told(store: Path) -> None:
    profile = load_profile("topk-sweep", engine="sim-exact")
    stored = noise_of_machine(profile.model, store)
    newer = NOISE.add(msgspec.structs.replace(stored, measured_at="2026-12-01T00:00:00Z"))
    newer.write_text("{}")
    noise_of_profile = noise_on_file(profile)
    assert noise_of_profile.noise == stored
    (warning,) = noise_of_profile.warnings
    assert str(newer) in warning.message


def noise_of_machine(model: str, store: Path) -> NoiseFloor:
    """Noise of this machine for sim-exact, stored."""
    import platform

    from benchctl.analysis.planning import engine_sha256
    from benchctl.measure.telemetry.gpus import gpu_inventory

    profile = load_profile("topk-sweep", engine="sim-exact")
    gpus = tuple(gpu.name for gpu in gpu_inventory())
    noise = floor(host=platform.node(), gpus=gpus, engine="sim", engine_sha256=engine_sha256(profile), model=model)
    NOISE.add(noise)
    return noise


def test_other_options_of_the_server_are_another_key(store: Path) -> None:
    exact, noisy = (load_profile("topk-sweep", engine=engine) for engine in ("sim-exact", "sim"))
    noise_of_machine(exact.model, store)
    assert noise_on_file(exact).noise is not None
    assert noise_on_file(noisy).noise is None


def test_an_experiment_of_one_server_is_stored_with_scatter_and_floor(tmp_path: Path, store: Path) -> None:
    results = a_against_a(tmp_path / "aa")
    profile = parse_profile(SAME_SERVER, "built")
    noise_result = keep_noise(results.path, profile)
    assert isinstance(noise_result, Path)
    (entry,) = NOISE.entries()
    assert entry.content is not None
    step = entry.content.metrics["step_ms"]
    low, high = estimate_paired([float(x) for x in SCATTER]).log_interval or (0.0, 0.0)
    assert step.num_blocks == 8
    assert step.floor_frac == pytest.approx(max(abs(low), abs(high)), rel=0.05)
    assert entry.content.metrics["step_ms"].log_sd == pytest.approx(0.0095, rel=0.1)


@pytest.mark.parametrize("state", ["suspect", "failed"])
def test_nothing_is_stored_of_an_experiment_with_a_run_that_is_not_done(
    tmp_path: Path, store: Path, state: str
) -> None:
    results = a_against_a(tmp_path / "aa")
    edit_run(results, results.plan().runs[3].run_id, state=state)
    noise_result = keep_noise(results.path, parse_profile(SAME_SERVER, "built"))
    assert isinstance(noise_result, str)
    assert f"1 of 16 runs of {results.path} are not done" in noise_result
    assert "--resume" in noise_result
    assert NOISE.entries() == ()


def test_nothing_is_stored_of_too_few_blocks_or_of_different_servers(tmp_path: Path, store: Path) -> None:
    few = keep_noise(a_against_a(tmp_path / "few", SCATTER[:5]).path, parse_profile(SAME_SERVER, "built"))
    assert isinstance(few, str)
    assert "at least 6" in few
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
    codes = [warning.code for warning in doubts_of(noise, results)]
    assert codes == ["noise-of-another-workload", "noise-old"]
    with_version = msgspec.structs.replace(noise, engine_version="1")
    assert version_warning(with_version, "1") is None
    assert version_warning(with_version, None) is None
    warning = version_warning(with_version, "2")
    assert warning is not None
    assert "1, and this is 2" in warning.message


def doubts_of(noise: NoiseFloor, results: ResultDirectory) -> tuple[ResultWarning, ...]:
    manifest = results.manifest()
    return noise_warnings(noise, manifest.request_set_sha256, manifest.created_at)


def test_age_is_in_whole_days() -> None:
    assert age_days(floor(), dt.datetime(2026, 11, 4, 11, 59, tzinfo=dt.UTC)) == 2


def test_an_experiment_that_measures_noise_takes_none_along_and_its_plan_says_why(store: Path) -> None:
    profile = load_profile("topk-sweep", engine="sim-exact")
    a_a = load_profile("aa", engine="sim-exact")
    NOISE.add(noise_of_machine(profile.model, store))
    assert noise_on_file(a_a).noise is None
    assert "(assumed: this experiment measures it)" in power_lines(a_a, None)[0]


def test_a_plan_says_what_the_noise_on_file_lets_it_show() -> None:
    profile = load_profile("topk-sweep", blocks=8)
    power_line, needed = power_lines(profile, floor())
    assert power_line.startswith(
        "with 8 blocks, 15 corrected tests and a scatter of 1.2% between blocks (A/A of 2026-11-01"
    )
    assert "2% assumed for tpot_ms, wall_s" in power_line
    detectable = minimum_detectable_effect(0.012, 8, num_tests=15, margin_frac=0.021, estimator="mean")
    assert f"a change of ±{percentage(detectable, 2)} in step_ms; " in power_line
    assert "with a power of 80%" in power_line
    assert "blocks" in needed


def test_a_plan_without_noise_on_file_says_that_it_assumes() -> None:
    assert "(assumed: no A/A on file)" in power_lines(load_profile("topk-sweep"), None)[0]


def test_a_screening_promises_nothing() -> None:
    lines = power_lines(load_profile("topk-sweep", blocks=2), floor())
    assert lines == ("a screening: 2 blocks give no verdict; at least 6 are needed",)


def test_a_rule_that_may_end_early_shows_less_with_the_same_blocks() -> None:
    fixed = power_lines(load_profile("topk-sweep", blocks=12), floor())
    ruled = power_lines(load_profile("topk-sweep", blocks=12, overrides=["stopping.precision=0.01"]), floor())
    assert smallest_change(ruled) > smallest_change(fixed)


def smallest_change(lines: tuple[str, ...]) -> float:
    """The first detectable change, in percent."""
    return float(lines[0].partition("±")[2].partition("%")[0])


def test_the_commands_add_list_show_and_remove(tmp_path: Path, store: Path) -> None:
    runner = CliRunner()

    def output_of(*args: str) -> str:
        result = runner.invoke(app, ["noise", *args], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    results = a_against_a(tmp_path / "aa")
    assert "no noise yet" in output_of("list")
    assert "stored: host-sim-qwen2.5-7b-" in output_of("add", str(results.path))
    assert "2026-01-01T00:00:00Z" in output_of("list")
    (listed,) = json.loads(output_of("list", "--json"))["noise"]
    assert listed["metrics"]["step_ms"]["num_blocks"] == 8
    assert listed["age_days"] > 0
    table = output_of("show", listed["key"])
    assert "floor" in table
    assert "step_ms" in table
    assert str(results.path) in table
    document = json.loads(output_of("show", str(results.path), "--json"))
    assert document["metrics"] == listed["metrics"]
    assert "removed 1 measurement" in output_of("remove", listed["key"])
    assert NOISE.entries() == ()


def test_showing_a_result_that_took_no_noise_along_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no noise: none was on file"):
        CliRunner().invoke(app, ["noise", "show", str(write_results(tmp_path).path)], catch_exceptions=False)
