"""What is recorded of the machine, the code and the environment, and what is kept out of the record."""

import subprocess
import sys
import time
from threading import Event

import psutil
import pytest

from benchctl.measure.machine import cpu_model, git_state, host_info, package_versions
from benchctl.measure.redaction import recorded_env, redacted_argv, server_env
from benchctl.measure.server.process import is_alive
from benchctl.measure.telemetry.samplers import host_samples
from benchctl.units import s_from_ns

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
    clean = git_state(package)
    assert (len(clean.sha), clean.is_dirty) == (40, False)
    (tmp_path / "notes.txt").write_text("outside the package\n")
    assert git_state(package) == clean
    (package / "code.py").write_text("x = 2\n")
    changed = git_state(package)
    assert (changed.sha, changed.is_dirty) == (clean.sha, True)
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
