"""The node of a run as its record has it: machine, devices that the server could see, build of the engine."""

import os
import platform
import venv
from functools import partial

import psutil
from support.cli import benchctl, only_result
from support.nvidia_smi import FakeSmi, devices
from support.nvml import FakeNvml
from support.servers.paced_engine import PacedEngine, planned, profile, request

from benchctl import __version__
from benchctl.engines.environment import build_versions
from benchctl.measure.machine import cpu_model, this_node
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.telemetry.gpus import numa_node, open_gpu
from benchctl.records.directory import RunDirectory, open_results
from benchctl.records.files import encode
from benchctl.records.schema import NodeGpu


def node_of_a_run(tmp_path, monkeypatch, nvml, visible):
    """The node of a run on a paced server, on a machine with the devices of ``nvml``."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("benchctl.measure.run.open_gpu", partial(open_gpu, nvml=nvml))
    context = RunContext(
        profile=profile(), requests=(request(0),), engine=PacedEngine(truth=tmp_path / "truth.jsonl")
    )
    return measure_run(context, planned(), RunDirectory(tmp_path / "runs" / "000-b0-baseline")).node


def test_a_run_records_its_machine_and_the_devices_and_build_of_its_server(tmp_path, monkeypatch):
    node = node_of_a_run(tmp_path, monkeypatch, FakeNvml(), "1,0")
    assert (node.name, node.hostname, node.platform) == (platform.node(), platform.node(), platform.platform())
    assert (node.cpu_model, node.memory_bytes) == (cpu_model(), psutil.virtual_memory().total)
    assert node.build == {"paced": "1.2"}
    assert node.gpus == (
        NodeGpu(
            index=1, name="GPU 1", uuid="GPU-11", memory_bytes=80 << 30, driver="570.1", max_sm_clock_mhz=1980,
            max_memory_clock_mhz=2619,
        ),
        NodeGpu(
            index=0, name="GPU 0", uuid="GPU-00", memory_bytes=80 << 30, driver="570.1", max_sm_clock_mhz=1980,
            max_memory_clock_mhz=2619, power_limit_w=700.0,
        ),
    )  # fmt: skip


def test_the_devices_are_those_that_the_server_sees_in_whatever_way_they_can_be_read(tmp_path, monkeypatch):
    assert node_of_a_run(tmp_path / "hidden", monkeypatch, FakeNvml(), "").gpus == ()
    smi = FakeSmi(tmp_path / "bin")
    smi.behave(devices=devices(1))
    monkeypatch.setenv("PATH", str(smi.directory), prepend=os.pathsep)
    (gpu,) = node_of_a_run(tmp_path / "smi", monkeypatch, FakeNvml(has_driver=False), "0").gpus
    assert None not in {gpu.uuid, gpu.driver}
    assert gpu.max_sm_clock_mhz is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_of_a_run(tmp_path / "none", monkeypatch, FakeNvml(has_driver=False), "0").gpus == ()


def test_the_cores_are_those_that_benchctl_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})
    assert this_node().cores == "3,5-6"


def test_in_a_slurm_job_the_node_has_the_names_of_slurm_and_nothing_else_of_the_environment(monkeypatch):
    outside = this_node()
    for name, value in {
        "SLURMD_NODENAME": "gpu-17",
        "SLURM_ARRAY_JOB_ID": "4711",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_ACCOUNT": "private-account",
    }.items():
        monkeypatch.setenv(name, value)
    inside = this_node()
    assert (outside.name, outside.job) == (platform.node(), None)
    assert (inside.name, inside.hostname, inside.job) == ("gpu-17", platform.node(), "slurm 4711_3")
    assert b"private" not in encode(inside)


def test_a_run_on_the_simulated_server_has_a_node_and_a_run_in_virtual_time_has_none(tmp_path):
    small = ("--set", "workload.num_prompts=2", "--set", "workload.output_len=8", "--blocks", "1")
    nodes = {}
    for command in ("run", "simulate"):
        (tmp_path / command).mkdir()
        words = (command, "--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", *small)
        done = benchctl(*words, cwd=tmp_path / command)
        assert done.returncode == 0, done.stdout + done.stderr
        results = open_results(only_result(tmp_path / command))
        nodes[command] = [run.read().node for run in results.begun_runs(results.plan())]
    seen = [(node.name, node.gpus, node.build) for node in nodes["run"]]
    assert seen == [(platform.node(), (), {"benchctl": __version__})] * 2
    assert nodes["simulate"] == [None, None]


def test_the_numa_node_of_a_device_is_that_of_its_pci_address(tmp_path):
    (tmp_path / "0000:65:00.0").mkdir()
    file = tmp_path / "0000:65:00.0" / "numa_node"
    for address, text, node in (
        ("00000000:65:00.0", "1", 1),
        ("0000:65:00.0", "0\n", 0),
        ("00000000:65:00.0", "-1\n", None),
        ("00000000:65:00.0", "many", None),
        ("00000000:66:00.0", "1", None),
        ("../../../etc", "1", None),
        (None, "1", None),
    ):
        file.write_text(text)
        assert numa_node(address, tmp_path) == node, address


def test_the_build_is_what_an_environment_has_installed_with_the_cuda_of_its_torch(tmp_path):
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    for name, version in {"vllm": "0.10.1", "torch": "2.8.0", "triton": "3.4.0", "requests": "2.0"}.items():
        metadata = packages / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (packages / "torch" / "version.py").write_text("cuda: Optional[str] = '12.8'\n")
    python = tmp_path / "env" / "bin" / "python"
    assert build_versions(python, ("vllm",)) == {
        "cuda": "12.8", "torch": "2.8.0", "triton": "3.4.0", "vllm": "0.10.1"
    }  # fmt: skip


def test_an_interpreter_that_cannot_say_what_it_has_is_no_error(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert build_versions(broken) == {}
    assert build_versions(tmp_path / "absent") == {}
