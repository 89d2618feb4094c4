"""What is recorded of the machine, the node, the code and the environment, and what is kept out of the record."""

import os
import platform
import subprocess
import sys
import time
import venv
from functools import partial
from threading import Event

import psutil
import pytest
from support.cli import WITHOUT_PICTURES, benchctl, only_result
from support.nvidia_smi import FakeSmi, devices
from support.nvml import FakeNvml
from support.servers.paced_engine import PacedEngine, planned, profile, request

from benchctl import __version__
from benchctl.engines.environment import build_versions
from benchctl.measure.machine import cpu_model, git_state, host_info, package_versions, this_node
from benchctl.measure.redaction import recorded_env, redacted_argv, server_env
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.process import is_alive
from benchctl.measure.telemetry.gpus import numa_node, open_gpu
from benchctl.measure.telemetry.samplers import host_samples
from benchctl.records.directory import RunDirectory, open_results
from benchctl.records.files import encode
from benchctl.records.schema import GitState, NodeGpu
from benchctl.units import s_from_ns


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
        done = benchctl(*words, cwd=tmp_path / command, **WITHOUT_PICTURES)
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


BUSY = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"


def wait_for_cpu_s(process, used_s, limit_s=20):
    """Until ``process`` has worked for that long, however little of the machine it gets."""
    before, deadline = process.cpu_times().user, time.monotonic() + limit_s
    while process.cpu_times().user - before < used_s:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def living(server):
    return [process for process in psutil.process_iter() if process.pid == server.pid and is_alive(process)]


def test_host_samples_tell_the_server_from_the_client():
    with subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) as server:
        try:
            samples = host_samples(lambda: living(server), 10, Event())
            first = next(samples)
            wait_for_cpu_s(psutil.Process(server.pid), 0.3)
            second = next(samples)
        finally:
            server.kill()
    elapsed_s = s_from_ns(second.t_ns - first.t_ns)
    assert (first.server_cpu_cores, first.client_cpu_cores, first.host_cpu_frac) == (None, None, None)
    assert second.server_rss_bytes > 1 << 20
    assert second.server_processes == 1
    assert second.server_cpu_cores * elapsed_s > 0.2
    assert second.server_cpu_cores < 1.3
    assert second.client_cpu_cores < second.server_cpu_cores
    assert 0 < second.host_cpu_frac <= 1


def test_host_samples_survive_the_death_of_the_server_and_look_for_new_workers():
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], start_new_session=True)
    stopped = Event()
    samples = host_samples(lambda: living(server), 100, stopped, scan_s=0.0)
    next(samples)
    server.kill()
    server.wait()
    after = next(samples)
    stopped.set()
    assert (after.server_processes, after.server_cpu_cores) == (0, 0.0)
    assert list(samples) == []


def test_the_host_is_described_as_far_as_it_can_be_read(tmp_path):
    host = host_info()
    assert (host.num_cores, host.python) == (psutil.cpu_count(), sys.version.split()[0])
    assert host.memory_bytes > 1 << 28
    assert None not in package_versions().values()
    file = tmp_path / "cpuinfo"
    assert cpu_model(file) is None
    for text, model in (
        ("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n", "Some CPU @ 3 GHz"),
        ("processor\t: 0\n", None),
    ):
        file.write_text(text)
        assert cpu_model(file) == model


def _git(directory, *arguments):
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


def test_the_commit_is_that_of_the_code_and_a_change_to_it_is_noticed(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("venv/\n")
    _git(tmp_path, "init")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    (tmp_path / "notes.txt").write_text("outside the package\n")
    clean = git_state(package)
    assert (len(clean.sha), clean.is_dirty) == (40, False)
    (package / "code.py").write_text("x = 2\n")
    assert git_state(package) == GitState(sha=clean.sha, is_dirty=True)
    (tmp_path / "venv").mkdir()
    assert git_state(tmp_path / "venv") is None
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path.parent) is None, "outside of git"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() is None, "without git"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (
            ["serve", "--api-key", "abc", "--port", "1"],
            ("serve", "--api-key", "[redacted: --api-key]", "--port", "1"),
        ),
        (["--hf-token=abc"], ("--hf-token=[redacted: --hf-token]",)),
        (["--max-num-batched-tokens", "8192"], ("--max-num-batched-tokens", "8192")),
        (["--tokenizer", "qwen"], ("--tokenizer", "qwen")),
        (["--token", "--port", "1"], ("--token", "--port", "1")),
        (["--url", "http://me:secret@host/x"], ("--url", "http://[redacted: password in a URL]@host/x")),
        (["--header", "X-Api-Key: abc"], ("--header", "X-Api-Key: [redacted: X-Api-Key]")),
        (["--header", "X-Key=${TEAM_KEY}"], ("--header", "X-Key=${TEAM_KEY}")),
        (
            ["--header=Authorization=Bearer opensesame"],
            ("--header=Authorization=Bearer [redacted: authorization]",),
        ),
        (["--note", "key sk-abcdefghijklmnop"], ("--note", "key [redacted: API key]")),
    ],
)
def test_secrets_do_not_reach_the_recorded_command_line(argv, shown):
    assert redacted_argv(argv) == shown


def test_secrets_do_not_reach_the_recorded_environment():
    env = {"HF_TOKEN": "hf_x", "OPENAI_API_KEY": "k", "TOKENIZERS_PARALLELISM": "false", "AUTHOR": "me"}
    assert recorded_env(env, env) == {
        "AUTHOR": "me",
        "HF_TOKEN": "[redacted: HF_TOKEN]",
        "OPENAI_API_KEY": "[redacted: OPENAI_API_KEY]",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_a_server_inherits_our_environment_without_our_secrets_but_may_fetch_its_model():
    ours = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "hf", "CUDA_VISIBLE_DEVICES": "0"}
    env = server_env(ours, {"MODE": "fast", "PATH": "/opt/bin"})
    assert env == {"PATH": "/opt/bin", "HF_TOKEN": "hf", "CUDA_VISIBLE_DEVICES": "0", "MODE": "fast"}
    assert recorded_env(env, {"MODE": "fast"}) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_TOKEN": "[redacted: HF_TOKEN]",
        "MODE": "fast",
    }
