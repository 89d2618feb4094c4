"""Servers that need a GPU: refused before the first one starts where none is seen, and a warning of a plan."""

import pytest
from support.cli import benchctl
from support.nvidia_smi import FakeSmi
from support.nvml import FakeNvml

from benchctl.analysis.planning import engine_sha256
from benchctl.measure.devices import absent_gpu, gpu_shortfalls
from benchctl.profile.load import load_profile, profile_sha256

NEEDY = ("vllm-lenvm-gpu", "sglang", "sglang-lenvm")
FREE = ("sim", "vllm", "vllm-cpu", "vllm-lenvm", "transformers-cpu", "llamacpp-cpu")


@pytest.fixture(autouse=True)
def _no_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def needs(engine, *overrides, nvml=None, profile="topk-sweep"):
    """The messages for a profile on a machine whose driver is that of ``nvml``; none by default."""
    loaded = load_profile(profile, engine=engine, overrides=overrides)
    return [
        (found.message, found.is_certain) for found in gpu_shortfalls(loaded, nvml or FakeNvml(has_driver=False))
    ]


def test_presets_for_gpus_need_one_and_those_for_cpus_none_unless_their_options_say_so():
    for engine in NEEDY:
        ((message, is_certain),) = needs(engine)
        assert is_certain
        assert message.startswith(
            "no GPU is seen here (NVML: no library; nvidia-smi: no program nvidia-smi is on the PATH)"
        )
        assert needs(engine, nvml=FakeNvml()) == []
    for engine in FREE:
        assert needs(engine) == []
    for engine, option, is_needed in (
        ("transformers-cpu", "device=cuda", True),
        ("transformers-cpu", "device=cuda:1", True),
        ("transformers-cpu", "device=auto", False),
        ("sglang", "device=cpu", False),
        ("vllm-lenvm-gpu", "needs_gpu=false", False),
        ("vllm-cpu", "needs_gpu=true", True),
    ):
        assert bool(needs(engine, f"engine.options.{option}")) is is_needed, option


def test_the_remedy_names_the_preset_that_needs_none():
    assert "--engine vllm-lenvm;" in needs("vllm-lenvm-gpu")[0][0]
    assert "--engine vllm-cpu;" in needs("vllm", "engine.options.needs_gpu=true")[0][0]
    assert "--engine" not in needs("sglang")[0][0]


def test_a_variable_that_hides_all_devices_counts_as_none_and_is_named(monkeypatch):
    for value in ("", "-1", "7", "GPU-zz"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        ((message, is_certain),) = needs("sglang", nvml=FakeNvml())
        assert is_certain
        assert f"CUDA_VISIBLE_DEVICES is {value!r}; NVML: none of its devices is visible" in message


def test_the_variable_of_the_server_counts_and_not_that_of_the_shell(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert needs("sglang", 'engine.options.env.CUDA_VISIBLE_DEVICES="1"', nvml=FakeNvml()) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert needs("sglang", 'engine.options.env.CUDA_VISIBLE_DEVICES=""', nvml=FakeNvml())


@pytest.mark.parametrize(
    ("file", "visible", "has_driver", "is_certain"),
    [
        (None, None, False, True),
        ("nvidia0", None, False, False),
        ("kfd", None, False, False),
        ("nvidiactl", None, False, True),
        ("nvidia0", "", False, True),
        ("nvidia0", "7", True, True),
    ],
)
def test_a_device_that_only_cannot_be_read_is_not_said_to_be_absent(
    tmp_path, file, visible, has_driver, is_certain
):
    if file is not None:
        (tmp_path / file).touch()
    absence = absent_gpu(visible, FakeNvml(has_driver=has_driver), tmp_path)
    assert absence[1] is is_certain


def test_the_demand_for_a_gpu_leaves_the_identity_of_an_experiment_as_it_was():
    with_demand = load_profile("topk-sweep", engine="vllm-lenvm-gpu")
    without = load_profile("topk-sweep", engine="vllm-lenvm-gpu", overrides=["engine.options.needs_gpu=false"])
    assert profile_sha256(with_demand) == profile_sha256(without)
    assert engine_sha256(with_demand) == engine_sha256(without)


def test_a_plan_warns_and_the_run_ends_with_2_before_it_leaves_anything(tmp_path):
    (tmp_path / "value").mkdir()
    command = ("run", "topk-sweep", "--engine", "vllm-lenvm-gpu", "--quick")
    planned = benchctl(*command, "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0
    assert planned.stderr.startswith("warning: not to be measured on this machine: no GPU is seen here (NVML: ")
    hidden = {"PATH": str(FakeSmi(tmp_path / "bin").directory), "CUDA_VISIBLE_DEVICES": ""}
    for env, says in (
        ({}, "benchctl: no GPU is seen here (NVML: "),
        (hidden, "no GPU is seen here (CUDA_VISIBLE_DEVICES is ''; NVML: "),
        (hidden, "nvidia-smi: none of its devices is visible"),
    ):
        refused = benchctl(*command, cwd=tmp_path, **env)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
        assert "--engine vllm-lenvm;" in refused.stderr
        assert not (tmp_path / "results").exists()


def test_doctor_demands_a_gpu_for_a_preset_that_needs_one(tmp_path):
    for engine in ("vllm-lenvm-gpu", "vllm-lenvm"):
        done = benchctl("doctor", "--engine", engine, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
        assert ("gpu device" in done.stdout.splitlines()[-1]) is (engine == "vllm-lenvm-gpu")
