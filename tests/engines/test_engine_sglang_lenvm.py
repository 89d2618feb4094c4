"""The LenVM fork as an engine: command line, requests, what is refused beforehand, and whole runs on a stand-in.

The stand-in (``servers/lenvm_server.py``) is a real process behind the real launcher; what it imitates is the fork.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import benchctl
from support.servers import lenvm_fork
from support.servers.lenvm_fork import settings_of
from support.steps import records_of

from benchctl.analysis.validity.launch import launch_settings, names_of
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.environment import installed_versions, package_directory
from benchctl.engines.sglang_lenvm import (
    SglangLenvmEngine,
    SglangLenvmOptions,
    custom_params,
    fork_interpreter,
    value_checkpoint,
)
from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.measure.run import RunContext, measure_run
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import PlannedRun, PreparedRequest, RunRecord
from benchctl.workload.prepare import prepare_requests

ENGINE = SglangLenvmEngine()
SITE = LaunchSite(port=10020, directory=Path("/results/000-b0-guided"))


@pytest.fixture(name="python")
def _python(tmp_path: Path) -> str:
    for known in (installed_versions, package_directory, fork_interpreter):
        known.cache_clear()
    return lenvm_fork.environment(tmp_path)


def asked(*, n: int = 1) -> PreparedRequest:
    return PreparedRequest(
        request_id="r", index=0, arrival_ns=0, prompt="Hi", prompt_tokens=5, max_tokens=8, ignore_eos=True, n=n,
        seed=3, source="test",
    )  # fmt: skip


def problem(guidance: Guidance | None, sampling: Sampling | None = None, *, n: int = 1, **options: Any) -> str:
    """Why such a request is refused; empty where it is not."""
    try:
        ENGINE.check_requests([asked(n=n)], settings_of(guidance, sampling, **options))
    except UnsupportedError as error:
        return str(error)
    return ""


def tilted(**changes: Any) -> Guidance:
    return Guidance(mode="centered_exp", **{"value_scale": -10.0, **changes})


def test_a_guided_server_is_started_as_the_fork_s_authors_start_it(python: str, tmp_path: Path) -> None:
    base = lenvm_fork.model(tmp_path, "base")
    settings = settings_of(
        tilted(), model=base, python=python, revision="V1", max_model_len=30000, mem_fraction_static=0.4,
        value_mem_fraction_static=0.4, enable_prefix_caching=True,
    )  # fmt: skip
    launcher, *words = ENGINE.argv(settings, SITE)[1:]
    assert Path(launcher).name == "stamped.py"
    assert words == [
        "/results/000-b0-guided/steps.pipe", "/results/000-b0-guided/steps.raw.jsonl",
        "-m", "sglang.launch_server", "--model-path", base, "--served-model-name", base,
        "--host", "127.0.0.1", "--port", "10020", "--random-seed", "0", "--enable-metrics", "--enable-cache-report",
        "--context-length", "30000", "--mem-fraction-static", "0.4", "--tp-size", "1", "--dp-size", "1",
        "--disable-overlap-schedule",
        "--enable-lvm-guided-sampling", "--lvm-guided-inproc", "--lvm-guided-inproc-model-path",
        "namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct",
        "--lvm-guided-inproc-json-model-override-args", '{"architectures": ["Qwen2ForLengthValueModel"]}',
        "--lvm-guided-inproc-mem-fraction-static", "0.4",
        "--lvm-guided-fn", "sglang.srt.lvm.lvm_guided_sampling:lvm_combined_guidance",
    ]  # fmt: skip


def test_a_server_without_a_value_model_has_none_of_its_flags(python: str, tmp_path: Path) -> None:
    base = lenvm_fork.model(tmp_path, "base")
    argv = ENGINE.argv(settings_of(model=base, python=python, revision="V1"), SITE)
    assert not [word for word in argv if "lvm" in word]
    assert "--disable-overlap-schedule" not in argv


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"revision": "V0"}, {}),
        ({"revision": "V1"}, {"SGLANG_LVM_TIMING_LOG": "/results/000-b0-guided/steps.pipe"}),
        ({"revision": "V2"}, {}),
        (
            {"revision": "V2", "synchronised_timing_interval": 50},
            {"SGLANG_LVM_TIMING": "1", "SGLANG_LVM_TIMING_INTERVAL": "50"},
        ),
        (
            {"revision": "V3", "stride": 5},
            {"SGLANG_LVM_TIMING_LOG": "/results/000-b0-guided/steps.pipe", "LENVM_STRIDE": "5"},
        ),
        ({"revision": "V4"}, {"SGLANG_LVM_TIMING_LOG": "/results/000-b0-guided/steps.pipe"}),
        ({"revision": "V4", "step_log": False}, {}),
        ({"revision": "V1", "tensor_parallel_size": 2}, {}),
    ],
)
def test_each_revision_records_its_steps_as_it_can(
    options: dict[str, Any], expected: dict[str, str], python: str, tmp_path: Path
) -> None:
    settings = settings_of(model=lenvm_fork.model(tmp_path, "base"), python=python, **options)
    env = ENGINE.env(settings, SITE)
    assert {name: value for name, value in env.items() if "LVM" in name or "LENVM" in name} == expected
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    has_lines = "SGLANG_LVM_TIMING_LOG" in expected
    assert ENGINE.has_steps(settings) is has_lines
    assert any("stamped.py" in word for word in ENGINE.argv(settings, SITE)) is has_lines


def test_options_that_no_revision_has_together_are_refused() -> None:
    with pytest.raises(
        ValueError, match="stride is 2 with revision V2; only some commits of V1 and V3 know strides"
    ):
        SglangLenvmOptions(revision="V2", stride=2)
    with pytest.raises(ValueError, match="only V2 prints averages"):
        SglangLenvmOptions(revision="V3", synchronised_timing_interval=10)


def test_custom_params_are_sent_with_guidance_and_left_out_altogether_without() -> None:
    body = json.loads(ENGINE.request_call(asked(), settings_of(tilted(value_entropy_threshold=0.5))).body)
    assert body["custom_params"] == {
        "mode": "centered_exp", "value_scale": -10.0, "gamma": 0.997, "value_entropy_threshold": 0.5,
    }  # fmt: skip
    assert "custom_params" not in json.loads(ENGINE.request_call(asked(), settings_of()).body)


def test_a_target_takes_the_place_of_mode_and_scale() -> None:
    params = custom_params(Guidance(target_length=300.0, target_length_mode="total", value_constraint="le"))
    assert params == {
        "gamma": 0.997, "target_length": 300.0, "target_length_mode": "total", "value_constraint": "le",
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["centered_exp", "value_bias"])
def test_a_mode_that_would_end_the_scheduler_is_refused(mode: str) -> None:
    guidance = Guidance(mode=mode, value_scale=-1.0)  # type: ignore[arg-type]
    for revision in ("V0", "V1", "V2", "V3", "V4"):
        assert "no path; set sampling.top_k to 2 or more" in problem(
            guidance, Sampling(top_k=-1), revision=revision
        )
        assert not problem(guidance, Sampling(top_k=2), revision=revision)
        assert not problem(guidance, Sampling(top_k=1), revision=revision), "greedy decoding is a control"


def test_targets_are_refused_on_v4() -> None:
    target = Guidance(target_length=100.0)
    assert not problem(target, Sampling(top_k=15), revision="V1")
    assert not problem(target, Sampling(top_k=-1), revision="V2")
    assert "dies of a target, for which V4 has no path" in problem(target, Sampling(top_k=15), revision="V4")


def test_v4_refuses_guidance_over_the_whole_vocabulary_in_every_mode() -> None:
    guidance = Guidance(mode="mul", value_scale=0.5)
    assert not problem(guidance, Sampling(top_k=-1), revision="V0")
    assert "dies of guidance with top_k -1 on V4" in problem(guidance, Sampling(top_k=-1), revision="V4")


def test_what_the_server_would_pass_over_in_silence_is_refused() -> None:
    ignored = problem(tilted(value_min=0.2), revision="V1")
    assert "ignores value_min where top_k is finite" in ignored
    assert not problem(Guidance(mode="mul", value_scale=0.5, value_min=0.2), Sampling(top_k=-1), revision="V1")
    gamma = problem(Guidance(mode="length_mul", value_scale=0.5, gamma=0.9998), revision="V1")
    assert "computes lengths with gamma 0.997 with a finite top_k, not with 0.9998" in gamma
    assert not problem(tilted(gamma=0.9998), revision="V1"), "this mode does not use it"


def test_guidance_with_an_overlapping_scheduler_is_refused() -> None:
    assert "set overlap_schedule: false" in problem(tilted(), revision="V1", overlap_schedule=True)
    assert not problem(None, revision="V1", value_model="qwen2.5-1.5b", overlap_schedule=True)


def test_several_choices_of_a_deterministic_server_are_refused_because_they_are_one() -> None:
    deterministic = ("--enable-deterministic-inference",)
    assert "one seed" in problem(tilted(), n=4, revision="V1", extra_args=deterministic)
    assert not problem(tilted(), n=1, revision="V1", extra_args=deterministic)
    assert not problem(tilted(), n=4, revision="V1")


def test_a_fork_of_an_unknown_revision_is_refused_with_the_option_that_names_it() -> None:
    for guidance in (None, tilted()):
        refused = problem(guidance)
        assert "variant 'guided'" in refused or "variant" in refused
        assert "--set engine.options.revision=V0 for the released code, V1 to V4" in refused
        assert not problem(guidance, revision="V0")


def test_published_value_models_go_by_their_size_and_others_by_directory_or_repository(tmp_path: Path) -> None:
    assert value_checkpoint("qwen2.5-0.5b") == "namezz/lvm-a-qwen2.5-7b-instruct-b-qwen2.5-0.5b-instruct"
    assert value_checkpoint("owner/other") == "owner/other"
    assert value_checkpoint(lenvm_fork.model(tmp_path, "value")) == str(tmp_path / "value")
    with pytest.raises(EngineUnavailableError, match=r"no value model is published for 'qwen2\.5-3b', only for"):
        value_checkpoint("qwen2.5-3b")


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("qwen2", "Qwen2ForLengthValueModel"),
        ("qwen3", "Qwen3ForLengthValueModel"),
        ("qwen2_5_vl", "Qwen2_5_VLForLengthValueModel"),
    ],
)
def test_the_class_of_a_value_model_follows_its_backbone(
    family: str, architecture: str, python: str, tmp_path: Path
) -> None:
    value_model = lenvm_fork.model(tmp_path, "value", model_type=family)
    base = lenvm_fork.model(tmp_path, "base")
    argv = ENGINE.argv(settings_of(model=base, python=python, value_model=value_model), SITE)
    assert f'{{"architectures": ["{architecture}"]}}' in argv
    named = settings_of(
        model=base, python=python, value_model=value_model, value_architecture="Qwen2ForLengthValueModel"
    )
    assert '{"architectures": ["Qwen2ForLengthValueModel"]}' in ENGINE.argv(named, SITE)


def test_stock_sglang_is_not_taken_for_the_fork(tmp_path: Path) -> None:
    fork_interpreter.cache_clear()
    python = lenvm_fork.environment(tmp_path, has_fork=False)
    settings = settings_of(model=lenvm_fork.model(tmp_path, "base"), python=python)
    with pytest.raises(EngineUnavailableError, match="is not the LenVM fork: it has no sglang/srt/lvm"):
        ENGINE.check_available(settings)


def test_an_environment_that_is_not_there_is_refused_with_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path / "none"))
    with pytest.raises(EngineUnavailableError, match=r"pip install -e sglang-LenVM/python in a checkout"):
        ENGINE.check_available(settings_of(model="qwen2.5-7b"))


@pytest.mark.parametrize(
    ("log_tail", "cause"),
    [
        ("Exception: Not implemented, cpu should not be used", "unguidable-request"),
        ("RuntimeError: Missing key(s): v_head.fc.weight", "bad-value-model"),
        ("ValueError: Failed to load guidance function from file: /x.py", "bad-flag"),
        ("RuntimeError: LenVM GPU guidance path failed", "guidance-failed"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out-of-memory"),
    ],
)
def test_the_end_of_a_log_tells_the_cause(log_tail: str, cause: str) -> None:
    known = ENGINE.diagnose(f"[2026-01-01 00:00:00] Scheduler hit an exception: Traceback\n{log_tail}\n")
    assert known is not None
    assert known.cause == cause


class Forked:
    """Runs on the stand-in: what it was, what it was asked, and what is on disk afterwards."""

    def __init__(self, directory: Path, python: str) -> None:
        self.directory, self.python = directory, python
        self.base, self.value = lenvm_fork.model(directory, "base"), lenvm_fork.model(directory, "value")

    def run(self, how: dict[str, Any], *, variant: str = "guided", **changes: Any) -> "Forked":
        truth = self.directory / "truth.jsonl"
        profile = lenvm_fork.profile(self.python, self.base, self.value, {"truth": str(truth), **how}, **changes)
        planned = PlannedRun(index=0, run_id=f"000-b0-{variant}", block=0, position=0, variant=variant)
        path = RunDirectory(self.directory / planned.run_id)
        context = RunContext(profile=profile, requests=prepare_requests(profile).requests)
        self.record = measure_run(context, planned, path)
        self.loaded = load_run(path)
        self.codes = [warning.code for warning in self.record.warnings]
        self.bodies = [msgspec.json.decode(line) for line in truth.read_bytes().splitlines()]
        return self


@pytest.fixture(name="forked")
def _forked(tmp_path: Path, python: str) -> Forked:
    return Forked(tmp_path, python)


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["V1", "V3", "V4"])
def test_a_guided_run_has_the_fork_s_steps_each_with_its_time(forked: Forked, revision: str) -> None:
    run = forked.run({"revision": revision}, options={"revision": revision})
    assert (run.record.state, run.record.failure) == ("done", None), run.codes
    assert run.record.effective_config["server.revision"] == revision
    steps = [step for step in records_of(run.loaded) if not step.is_warmup]
    assert len(steps) >= 12
    assert sum(step.num_seqs for step in steps) == 2 * 12
    for before, after in pairwise(steps):
        assert after.start_ns >= before.start_ns + before.dur_ns
    assert all(step.dur_ns >= step.sections_ns["sampler_total"] for step in steps)
    assert all(step.clock == "host" and step.guided_rows == step.num_seqs for step in steps)
    assert {step.fused for step in steps} == {"V1": {None}, "V3": {True}, "V4": {True}}[revision]
    assert {step.candidates is None for step in steps} == {revision != "V4"}
    assert all(body["custom_params"]["mode"] == "centered_exp" for body in run.bodies)


@pytest.mark.slow
def test_the_value_model_is_loaded_before_anything_is_measured(forked: Forked) -> None:
    run = forked.run({"revision": "V1", "load_s": 0.5}, options={"revision": "V1"})
    loads = [step for step in records_of(run.loaded) if "value_model_load" in step.sections_ns]
    assert [step.is_warmup for step in loads] == [True]
    assert loads[0].sections_ns["value_model_load"] >= 490_000_000
    assert run.record.state == "done", run.codes


@pytest.mark.slow
def test_a_baseline_run_asks_for_no_guidance_and_its_steps_say_so(forked: Forked) -> None:
    run = forked.run({"revision": "V1"}, variant="baseline", options={"revision": "V1"})
    assert run.record.state == "done", run.codes
    assert not any("custom_params" in body for body in run.bodies)
    assert {step.guided_rows for step in records_of(run.loaded)} == {0}
    assert not any("lvm" in word for word in run.record.argv)


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["V0", "V2"])
def test_a_revision_that_writes_no_lines_has_no_steps(forked: Forked, revision: str) -> None:
    options: dict[str, Any] = {"revision": revision}
    if revision == "V2":
        options["synchronised_timing_interval"] = 5
    run = forked.run({"revision": revision}, options=options)
    assert run.record.state == "done", run.codes
    assert "steps-unknown" in run.codes
    assert (
        "[sampler_timing] calls=5 " in RunDirectory(forked.directory / "000-b0-guided").server_log.read_text()
    ) is (revision == "V2")


@pytest.mark.slow
def test_a_server_of_another_revision_than_declared_is_found_out(forked: Forked) -> None:
    with pytest.raises(UnsupportedError, match="the server is not V4: its output fits V1 or V3"):
        forked.run({"revision": "V1"}, options={"revision": "V4"})


@pytest.mark.slow
def test_a_server_with_another_value_model_than_asked_for_is_found_out(forked: Forked) -> None:
    with pytest.raises(UnsupportedError, match="reports the value model /elsewhere"):
        forked.run({"revision": "V1", "told": "/elsewhere"}, options={"revision": "V1"})


@pytest.mark.parametrize(
    ("profile", "cells"),
    [
        ("topk-sweep", ["top_k=1", "top_k=2", "top_k=3", "top_k=4", "top_k=5"]),
        ("lenvm-model-sizes", ["value_model=qwen2.5-0.5b", "value_model=qwen2.5-1.5b"]),
    ],
)
def test_the_paper_s_experiments_are_planned_for_the_fork_once_its_revision_is_said(
    profile: str, cells: list[str], python: str, tmp_path: Path
) -> None:
    command = ["run", "--profile", profile, "--engine", "sglang-lenvm", "--set", f"engine.python={python}"]
    refused = benchctl(*command, "--dry-run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--set engine.options.revision=V0 for the released code" in refused.stderr
    planned = benchctl(*command, "--set", "engine.options.revision=V1", "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert not [line for line in planned.stderr.splitlines() if "allowed_differences" in line]
    for cell in cells:
        assert cell in planned.stdout
    assert f" blocks of {1 + len(cells)}, " in planned.stdout


def test_what_a_value_model_adds_to_a_launch_is_declared_by_its_option(python: str, tmp_path: Path) -> None:
    base = lenvm_fork.model(tmp_path, "base")
    plain, guided = (
        launch_settings(launched(settings_of(guidance, model=base, python=python, overlap_schedule=False)))
        for guidance in (None, tilted())
    )
    differing = [key for key in plain.keys() | guided.keys() if plain.get(key) != guided.get(key)]
    assert len(differing) == 5
    assert all("server.value_model" in names_of(key) for key in differing)


def launched(settings: VariantSettings) -> RunRecord:
    return RunRecord(
        schema_version=3, index=0, run_id="000-b0-guided", block=0, position=0, variant="guided",
        argv=ENGINE.argv(settings, SITE), env=ENGINE.env(settings, SITE),
    )  # fmt: skip


def test_the_engine_goes_by_its_name() -> None:
    assert isinstance(engine_for("sglang-lenvm"), SglangLenvmEngine)
