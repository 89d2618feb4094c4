"""The LenVM fork as an engine: command line, requests, what is refused beforehand, and whole runs on a stand-in.

The stand-in (``servers/lenvm_server.py``) is a real process behind the real launcher; what it imitates is the fork.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.engine_settings import asked
from support.servers import lenvm_fork
from support.servers.lenvm_fork import settings_of
from support.steps import records_of

from benchctl.engines.engine import LaunchSite
from benchctl.engines.environment import installed_versions, package_directory
from benchctl.engines.sglang_lenvm import SglangLenvmEngine, custom_params, fork_interpreter
from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.measure.run import RunContext, measure_run
from benchctl.profile.model import Guidance, Sampling
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import LoadedRun, load_run
from benchctl.records.record import PlannedRun
from benchctl.workload.prepare import prepare_requests

ENGINE = SglangLenvmEngine()
SITE = LaunchSite(port=10020, directory=Path("/results/000-b0-guided"))


@pytest.fixture(name="python")
def _python(tmp_path: Path) -> str:
    for known in (installed_versions, package_directory, fork_interpreter):
        known.cache_clear()
    return lenvm_fork.environment(tmp_path)


def problem(guidance: Guidance | None, sampling: Sampling | None = None, *, n: int = 1, **options: Any) -> str:
    """Why such a request is refused; empty where it is not."""
    try:
        ENGINE.check_requests([asked(n=n)], settings_of(guidance, sampling, **options))
    except UnsupportedError as error:
        return str(error)
    return ""


TILT = "centered_exp"


def tilted(**changes: Any) -> Guidance:
    return Guidance(**{"mode": TILT, "value_scale": -10.0, **changes})


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"revision": "V0"}, {}),
        ({"revision": "V1"}, {"SGLANG_LVM_TIMING_LOG": "/results/000-b0-guided/steps.pipe"}),
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


def test_custom_params_are_sent_with_guidance_a_target_takes_the_place_of_mode_and_scale() -> None:
    body = json.loads(ENGINE.request_call(asked(), settings_of(tilted(value_entropy_threshold=0.5))).body)
    assert body["custom_params"] == {
        "mode": TILT, "value_scale": -10.0, "gamma": 0.997, "value_entropy_threshold": 0.5,
    }  # fmt: skip
    assert "custom_params" not in json.loads(ENGINE.request_call(asked(), settings_of()).body)
    target = {"target_length": 300.0, "target_length_mode": "total", "value_constraint": "le"}
    assert custom_params(Guidance(**target)) == {"gamma": 0.997, **target}


ALL, FEW = Sampling(top_k=-1), Sampling(top_k=15)
MUL, TARGET, BIAS = Guidance(mode="mul", value_scale=0.5), Guidance(target_length=100.0), "value_bias"
LENGTHS = {"mode": "length_mul", "value_scale": 0.5}
DETERMINISTIC = {"extra_args": ("--enable-deterministic-inference",)}
REFUSED: list[tuple[Guidance | None, Sampling | None, dict[str, Any], str]] = [
    *((tilted(mode=mode), ALL, {"revision": "V2"}, "no path; set sampling.top_k to 2") for mode in (TILT, BIAS)),
    (TARGET, FEW, {"revision": "V4"}, "dies of a target, for which V4 has no path"),
    (MUL, ALL, {"revision": "V4"}, "dies of guidance with top_k -1 on V4"),
    (tilted(value_min=0.2), None, {}, "ignores value_min where top_k is finite"),
    (
        Guidance(**LENGTHS, gamma=0.9998),
        None,
        {},
        "computes lengths with gamma 0.997 with a finite",
    ),
    (tilted(), None, {"overlap_schedule": True}, "set overlap_schedule: false"),
    (tilted(), None, {"n": 4, **DETERMINISTIC}, "one seed"),
    *((who, None, {"revision": None}, "revision=V0 for the released code, V1 to V4") for who in (None, tilted())),
]
SERVED: list[tuple[Guidance | None, Sampling | None, dict[str, Any]]] = [
    *((tilted(mode=mode), Sampling(top_k=k), {"revision": "V2"}) for mode in (TILT, BIAS) for k in (2, 1)),
    (TARGET, FEW, {}),
    (TARGET, ALL, {"revision": "V2"}),
    (MUL, ALL, {"revision": "V0"}),
    (Guidance(mode="mul", value_scale=0.5, value_min=0.2), ALL, {}),
    (tilted(gamma=0.9998), None, {}),  # this mode does not use it
    (None, None, {"value_model": "qwen2.5-1.5b", "overlap_schedule": True}),
    (tilted(), None, {"n": 4}),
    (tilted(), None, DETERMINISTIC),
]


def test_what_the_server_dies_of_ignores_or_computes_otherwise_is_refused_and_nothing_else() -> None:
    for guidance, sampling, options, message in REFUSED:
        assert message in problem(guidance, sampling, **{"revision": "V1", **options}), message
    for guidance, sampling, options in SERVED:
        assert not problem(guidance, sampling, **{"revision": "V1", **options}), options
    with pytest.raises(ValueError, match="stride is 2 with revision V2; only some commits of V1 and V3 know"):
        settings_of(revision="V2", stride=2)
    with pytest.raises(ValueError, match="only V2 prints averages"):
        settings_of(revision="V3", synchronised_timing_interval=10)


def test_published_value_models_go_by_their_size_and_the_class_of_others_follows_their_backbone(
    python: str, tmp_path: Path
) -> None:
    base = lenvm_fork.model(tmp_path, "base")

    def said(value_model: str, **options: str) -> tuple[str, str]:
        """The checkpoint and the class on the command line."""
        argv = ENGINE.argv(settings_of(model=base, python=python, value_model=value_model, **options), SITE)
        words = dict(pairwise(argv))
        architectures = json.loads(words["--lvm-guided-inproc-json-model-override-args"])["architectures"]
        return words["--lvm-guided-inproc-model-path"], *architectures

    published = "namezz/lvm-a-qwen2.5-7b-instruct-b-qwen2.5-0.5b-instruct"
    assert said("qwen2.5-0.5b") == (published, "Qwen2ForLengthValueModel")
    with pytest.raises(EngineUnavailableError, match=r"no value model is published for 'qwen2\.5-3b', only for"):
        said("qwen2.5-3b")
    for family, prefix in (("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("qwen2_5_vl", "Qwen2_5_VL")):
        value_model = lenvm_fork.model(tmp_path, family, model_type=family)
        assert said(value_model) == (value_model, f"{prefix}ForLengthValueModel")
    assert said(value_model, value_architecture="Qwen2ForLengthValueModel")[1] == "Qwen2ForLengthValueModel"


def test_stock_sglang_is_not_taken_for_the_fork_and_no_environment_is_refused_with_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_interpreter.cache_clear()
    python = lenvm_fork.environment(tmp_path, has_fork=False)
    settings = settings_of(model=lenvm_fork.model(tmp_path, "base"), python=python)
    with pytest.raises(EngineUnavailableError, match="is not the LenVM fork: it has no sglang/srt/lvm"):
        ENGINE.check_available(settings)
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path / "none"))
    with pytest.raises(EngineUnavailableError, match=r"pip install -e sglang-LenVM/python in a checkout"):
        ENGINE.check_available(settings_of(model="qwen2.5-7b"))


Measured = tuple[LoadedRun, list[dict[str, Any]]]


@pytest.fixture(name="measured")
def _measured(tmp_path: Path, python: str) -> Callable[..., Measured]:
    """Measures a run on the stand-in, and gives it as it is on disk and the bodies of its requests."""
    base, value, truth = lenvm_fork.model(tmp_path, "base"), lenvm_fork.model(tmp_path, "value"), tmp_path / "truth"

    def measure(declared: str, variant: str = "guided", **how: Any) -> Measured:
        how = {"truth": str(truth), "revision": declared, **how}
        profile = lenvm_fork.profile(python, base, value, how, options={"revision": declared})
        planned = PlannedRun(index=0, run_id=f"000-b0-{variant}", block=0, position=0, variant=variant)
        path = RunDirectory(tmp_path / planned.run_id)
        record = measure_run(
            RunContext(profile=profile, requests=RequestSets.single(prepare_requests(profile))), planned, path
        )
        assert (record.state, record.failure) == ("done", None), record.warnings
        return load_run(path), [json.loads(line) for line in truth.read_bytes().splitlines()]

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["V1", "V4"])
def test_a_guided_run_has_the_fork_s_steps_each_with_its_time_and_loads_its_value_model_in_the_warm_up(
    measured: Callable[..., Measured], revision: str
) -> None:
    run, bodies = measured(revision, load_s=0.5)
    assert run.record.effective_config["server.revision"] == revision
    steps = [step for step in records_of(run) if not step.is_warmup]
    assert len(steps) >= 12
    assert sum(step.num_seqs for step in steps) == 2 * 12
    assert all(after.start_ns >= before.start_ns + before.dur_ns for before, after in pairwise(steps))
    assert all(step.dur_ns >= step.sections_ns["sampler_total"] for step in steps)
    assert all(step.clock == "host" and step.guided_rows == step.num_seqs for step in steps)
    told = {"V1": (None, True), "V4": (True, False)}[revision]
    assert {(step.fused, step.candidates is None) for step in steps} == {told}
    assert all(body["custom_params"]["mode"] == TILT for body in bodies)
    (load,) = (step for step in records_of(run) if "value_model_load" in step.sections_ns)
    assert load.is_warmup
    assert load.sections_ns["value_model_load"] >= 490_000_000


@pytest.mark.slow
def test_a_baseline_run_asks_for_no_guidance_and_a_server_that_is_not_what_was_declared_is_noticed(
    measured: Callable[..., Measured],
) -> None:
    run, bodies = measured("V1", "baseline")
    assert not any("custom_params" in body for body in bodies)
    assert {step.guided_rows for step in records_of(run)} == {0}
    assert not any("lvm" in word for word in run.record.argv)
    for declared, how, message in (
        ("V4", {"revision": "V1"}, "the server is not V4: its output fits V1 or V3"),
        ("V1", {"told": "/elsewhere"}, "reports the value model /elsewhere"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            measured(declared, **how)
