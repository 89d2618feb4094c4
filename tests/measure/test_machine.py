"""What is recorded of the machine, the node, the code and the environment, and who gets which cores."""

import os
import platform
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import psutil
import pytest
from support.cli import printed
from support.nvidia_smi import FakeSmi
from support.nvml import FakeNvml
from support.servers.paced_engine import PacedEngine, planned, profile, request
from support.waiting import wait_until

from benchctl import __version__
from benchctl.engines.environment import build_versions
from benchctl.measure.machine import cpu_model, git_state, host_info, package_versions, this_node
from benchctl.measure.redaction import recorded_env, redacted_argv, server_env
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server import process as resources
from benchctl.measure.server.process import Supervised, is_alive, process_on, split_cores
from benchctl.measure.server.supervise import Launched
from benchctl.measure.telemetry.gpus import numa_node, open_gpu
from benchctl.measure.telemetry.samplers import host_samples
from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import RequestSets, RunDirectory, open_results
from benchctl.records.files import encode
from benchctl.records.schema import GitState, NodeGpu
from benchctl.units import s_from_ns

ALL = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


needs_two_cores = pytest.mark.skipif(len(ALL) < 2, reason="the machine has one core, which both sides share")


def measured(tmp_path):
    """The record of a run on a paced server."""
    engine = PacedEngine(truth=tmp_path / "truth.jsonl")
    context = RunContext(profile=profile(), requests=RequestSets.single((request(0, gap_ms=1),)), engine=engine)
    return measure_run(context, planned(), RunDirectory(tmp_path / "runs" / "000-b0-baseline"))


@pytest.fixture(name="node_with")
def _node_with(tmp_path, monkeypatch):
    """The node of a run on a machine with the devices of ``nvml``, of which some are visible."""

    def node_with(name, nvml, visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("benchctl.measure.run.open_gpu", partial(open_gpu, nvml=nvml))
        return measured(tmp_path / name).node

    return node_with


def test_a_run_records_its_machine_and_the_devices_and_build_of_its_server(node_with):
    node = node_with("run", FakeNvml(), "1,0")
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


def test_the_devices_are_those_that_the_server_sees_in_whatever_way_they_can_be_read(
    node_with, tmp_path, monkeypatch
):
    assert node_with("hidden", FakeNvml(), "").gpus == ()
    monkeypatch.setenv("PATH", str(FakeSmi(tmp_path / "bin").directory), prepend=os.pathsep)
    (gpu,) = node_with("smi", FakeNvml(has_driver=False), "0").gpus
    assert (gpu.uuid, gpu.driver, gpu.max_sm_clock_mhz) == ("GPU-aa", "570.1", None)


def test_the_node_has_the_cores_that_may_be_used_and_in_a_slurm_job_the_names_of_slurm_and_nothing_else(
    monkeypatch,
):
    outside = this_node()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})
    job = {"SLURMD_NODENAME": "gpu-17", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    for name, value in {**job, "SLURM_JOB_ACCOUNT": "private-account"}.items():
        monkeypatch.setenv(name, value)
    inside = this_node()
    assert (outside.name, outside.job) == (platform.node(), None)
    assert (inside.name, inside.hostname, inside.job) == ("gpu-17", platform.node(), "slurm 4711_3")
    assert inside.cores == "3,5-6"
    assert b"private" not in encode(inside)


def test_a_run_on_the_simulated_server_has_a_node_and_a_run_in_virtual_time_has_none(tmp_path):
    small = ("--set", "workload.num_prompts=2", "--set", "workload.output_len=8", "--blocks", "1")
    node = (platform.node(), (), {"benchctl": __version__})
    for command, expected in (("run", node), ("simulate", (None, None, None))):
        words = (command, "--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", *small, "-o", command)
        printed(*words, cwd=tmp_path)
        nodes = [run.read().node for run in open_results(tmp_path / command).runs()]
        seen = [tuple(getattr(each, name, None) for name in ("name", "gpus", "build")) for each in nodes]
        assert seen == [expected] * 2


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
    assert build_versions(Path("/bin/false")) == build_versions(tmp_path / "absent") == {}


BUSY = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"


def test_host_samples_tell_the_server_from_the_client_and_survive_its_death():
    stopped = Event()
    with subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) as server:
        process = psutil.Process(server.pid)
        try:
            samples = host_samples(lambda: [process] if is_alive(process) else [], 10, stopped, scan_s=0.0)
            first = next(samples)
            before_s = process.cpu_times().user
            wait_until("0.3 s of work", lambda: process.cpu_times().user - before_s > 0.3)
            second = next(samples)
        finally:
            server.kill()
    after = next(samples)
    stopped.set()
    elapsed_s = s_from_ns(second.t_ns - first.t_ns)
    assert (first.server_cpu_cores, first.client_cpu_cores, first.host_cpu_frac) == (None, None, None)
    assert second.server_rss_bytes > 1 << 20
    assert second.server_processes == 1
    assert 0.2 / elapsed_s < second.server_cpu_cores < 1.3
    assert second.client_cpu_cores < second.server_cpu_cores
    assert 0 < second.host_cpu_frac <= 1
    assert (after.server_processes, after.server_cpu_cores, list(samples)) == (0, 0.0, [])


def test_the_host_is_described_as_far_as_it_can_be_read(tmp_path):
    host, file = host_info(), tmp_path / "cpuinfo"
    assert (host.num_cores, host.python) == (psutil.cpu_count(), sys.version.split()[0])
    assert None not in package_versions().values()
    assert cpu_model(file) is None
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_model(file) == "Some CPU @ 3 GHz"


def test_the_commit_is_that_of_the_code_and_a_change_to_it_is_noticed(tmp_path, monkeypatch):
    code, ignored = tmp_path / "package" / "code.py", tmp_path / "venv"
    for directory in (code.parent, ignored):
        directory.mkdir()
    code.write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("venv/\n")
    commit = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "commit", "-m", "first")
    for words in (("init",), ("add", "."), commit):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "notes.txt").write_text("outside the package\n")
    clean = git_state(code.parent)
    assert (len(clean.sha), clean.is_dirty, git_state(ignored)) == (40, False, None)
    code.write_text("x = 2\n")
    assert git_state(code.parent) == GitState(sha=clean.sha, is_dirty=True)
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


def test_a_server_inherits_our_environment_without_our_secrets_but_may_fetch_its_model_and_none_is_recorded():
    ours = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "hf", "CUDA_VISIBLE_DEVICES": "0"}
    env = server_env(ours, {"MODE": "fast", "PATH": "/opt/bin", "TOKENIZERS_PARALLELISM": "false"})
    named = {"MODE": "fast", "TOKENIZERS_PARALLELISM": "false"}
    assert env == {"PATH": "/opt/bin", "HF_TOKEN": "hf", "CUDA_VISIBLE_DEVICES": "0", **named}
    assert recorded_env(env, named) == {
        "CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "[redacted: HF_TOKEN]", **named
    }  # fmt: skip


@pytest.fixture(name="machine")
def _machine(monkeypatch):
    """Makes a machine of so many cores of what the system says."""
    return lambda *numbers: monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: set(numbers))


def test_the_client_gets_the_last_cores_where_somebody_asked_or_one_for_each_of_its_processes_where_eight_are_there(
    machine,
):
    for usable, asked, num_processes, cores in (
        (range(2), 1, 1, "client on 1, server on 0"),
        (range(8), 2, 1, "client on 6-7, server on 0-5"),
        ((0, 1, 4, 6, 7), 2, 1, "client on 6-7, server on 0-1,4"),
        (range(2), 5, 1, "client on 1, server on 0"),
        ((3,), 1, 1, None),
        (range(2), 0, 1, None),
        (range(1), "auto", 1, None),
        (range(7), "auto", 1, None),
        (range(8), "auto", 1, "client on 7, server on 0-6"),
        (range(16), "auto", 3, None),
        (range(24), "auto", 3, "client on 21-23, server on 0-20"),
    ):
        machine(*usable)
        split = split_cores(asked, num_processes)
        assert (split and split.as_config()["server.client_cores"]) == cores, (usable, asked)


@needs_two_cores
def test_a_server_begins_on_its_cores_and_we_stay_where_we_are(tmp_path):
    first = min(ALL)
    said = tmp_path / "said"
    program = f"import os; open({str(said)!r}, 'w').write(repr(os.sched_getaffinity(0)))"
    launched = Launched(argv=(sys.executable, "-c", program), env=dict(os.environ), raw_log=str(tmp_path / "log"))
    started = Supervised(launched, frozenset({first}))
    wait_until("its end", lambda: started.returncode is not None)
    started.stop(1)
    assert said.read_text() == repr({first})
    assert os.sched_getaffinity(0) == ALL


@needs_two_cores
def test_all_threads_of_the_client_are_bound_and_those_that_begin_later_and_its_children():
    last = max(ALL)
    with ThreadPoolExecutor(1) as early, ThreadPoolExecutor(1) as late:
        early.submit(os.getpid).result()
        with process_on(frozenset({last})):
            bound = [thread.submit(os.sched_getaffinity, 0).result() for thread in (early, late)]
            bound.append(os.sched_getaffinity(0))
            program = "import os; print(os.sched_getaffinity(0))"
            child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert bound == [{last}] * 3
    assert child.stdout == f"{ {last} }\n"
    assert os.sched_getaffinity(0) == ALL


@needs_two_cores
def test_a_run_says_which_cores_its_server_had(tmp_path, monkeypatch):
    """The paced server speaks for a real one; its options are those of the simulator, which know no cores."""
    options = variant_settings(profile(), "baseline", {}).server
    monkeypatch.setattr(type(options), "client_cores", 1, raising=False)
    record = measured(tmp_path)
    assert record.state == "done"
    assert split_cores(1).as_config().items() <= record.effective_config.items()
    assert os.sched_getaffinity(0) == ALL


def test_presets_without_a_gpu_leave_the_client_a_core_in_all_variants_alike_and_the_simulator_is_never_bound():
    of_cpu = dict.fromkeys(("vllm-cpu", "vllm-lenvm", "transformers-cpu", "llamacpp-cpu"), 1)
    for engine, option in {**of_cpu, "vllm": "auto", "vllm-lenvm-gpu": "auto", "sglang": "auto", "sim": 0}.items():
        loaded = load_profile("topk-sweep", engine=engine)
        assert {getattr(variant_settings(loaded, *arm).server, "client_cores", 0) for arm in arms(loaded)} == {
            option
        }
