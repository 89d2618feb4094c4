"""The start of a server, and its log: what is heard and kept of it, and every way in which a start fails."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.servers.paced_engine import running, up
from support.servers.stubborn_engine import CORE, launch, processes_of
from support.waiting import wait_until

from benchctl.errors import PortTakenError, RunError, ServerStartError
from benchctl.measure.server import supervise
from benchctl.measure.server.health import ServerLog, Shortage
from benchctl.measure.server.process import choose_port, is_alive, is_free, is_listening, wait_free
from benchctl.measure.server.server import ServerProcess
from benchctl.untrusted.secrets import Redactor

SECRET = "opensesame-4711-opensesame"
MARK = "[redacted: TEAM_KEY]"
LINES = "\n".join([*(f"line {i}" for i in range(30)), "CUDA out of memory"])


def test_a_server_that_was_started_is_ready_and_then_gone_and_what_it_said_was_passed_on(tmp_path):
    heard = []
    how = replace(launch(tmp_path, "--start-delay-s", "0.3"), on_log_line=heard.append)
    with up(how) as server:
        pid, ready_ns = server.pid, time.monotonic_ns()
        assert (is_free(how.port), is_listening(psutil.Process(pid), how.port)) == (False, True)
    assert server.launch_ns < ready_ns < server.stop_ns
    assert (psutil.pid_exists(pid), is_free(how.port), server.warnings) == (False, True, ())
    assert "paced server listening" in how.log.read_text()
    assert heard[0] == "paced server starting"
    assert set(heard) <= {"paced server starting", "paced server listening"}


@pytest.mark.parametrize(
    ("flags", "message", "cause"),
    [
        (
            ("--die-saying", LINES),
            r"ended with exit code 1 before it was ready \(out-of-memory\); lower",
            "out-of-memory",
        ),
        (("--die-saying", "so long"), "exit code 1 before it was ready; its log says why", "server-died"),
        (("--die-saying", "error: unrecognized arguments: --frob"), "correct the flag", "bad-flag"),
        (("--port-taken",), r"is alive but will never be ready \(port-taken\)", "port-taken"),
        (("--serve-from-child", "leave", "--leave-after-s", "0"), "exit code 0 before it was ready", "server-died"),
        (
            ("--never-ready",),
            "not ready within 1 s: GET /health answered 503, its log ends 'paced server listening'; raise timeouts",
            "not-ready",
        ),
        (
            ("--start-delay-s", "60", "--chatter-bytes", "5000000"),
            "not ready within 1 s: .*, its log ends 'paced server starting'",
            "not-ready",
        ),
    ],
)
def test_a_server_that_does_not_become_ready_fails_as_soon_as_it_is_known_with_cause_remedy_and_log(
    tmp_path, flags, message, cause
):
    how = launch(tmp_path, *flags, ready_s=1.0 if cause == "not-ready" else 60.0)
    with pytest.raises(ServerStartError, match=message) as caught, up(how):
        pass
    assert (caught.value.cause, caught.value.is_profile_error) == (cause, cause == "bad-flag")
    assert is_free(how.port)
    if LINES in flags:
        tail = caught.value.log_tail.splitlines()
        assert (len(tail), tail[-1], str(how.log) in str(caught.value)) == (20, "CUDA out of memory", True)


def test_a_program_that_does_not_exist_is_a_start_error(tmp_path):
    absent = pytest.raises(ServerStartError, match=r"'no-such-engine' cannot be started: .*install the engine")
    with absent, up(replace(launch(tmp_path), argv=("no-such-engine", "--port", "1"))):
        pass


def test_a_child_that_serves_is_the_server_s_own_while_its_parent_lives(tmp_path):
    how = launch(tmp_path, "--serve-from-child", "stay", "--leave-after-s", "0")
    with up(how) as server:
        child = wait_until("the child", lambda: psutil.Process(server.pid).children())[0]
        psutil.Process(server.pid).kill()
    assert (is_alive(child), is_free(how.port), server.warnings) == (False, True, ())


def test_an_orphan_of_an_earlier_run_that_answers_is_not_taken_for_a_server_that_still_loads(tmp_path):
    (tmp_path / "orphan").mkdir()
    with running(tmp_path / "orphan") as orphan:
        slow = (*orphan.argv, "--start-delay-s", "60")
        loading = replace(orphan, argv=slow, log=tmp_path / "server.log", port_wait_s=0.0)
        taken = pytest.raises(ServerStartError, match="by a process that is not the server just started")
        with taken as caught, up(loading):
            pass
    assert (caught.value.cause, is_free(orphan.port)) == ("port-taken", True)


def test_an_engine_process_that_dies_before_the_server_is_ready_ends_the_start(tmp_path):
    def kill_core():
        time.sleep(1.5)  # two looks, by which it is known as an engine process
        children = [child for process in processes_of(str(tmp_path)) for child in process.children()]
        next(child for child in children if CORE in child.cmdline()).kill()

    threading.Thread(target=kill_core).start()
    gone = pytest.raises(ServerStartError, match=f"{CORE}.* has gone before it was ready")
    with gone as caught, up(launch(tmp_path, "--core", "stay", "--never-ready", ready_s=60.0)):
        pass
    assert "engine core died" in caught.value.log_tail


def test_a_port_that_stays_held_is_a_warning(tmp_path):
    how = saying(tmp_path, "import time; time.sleep(60)")
    with socket.create_server(("127.0.0.1", how.port)), ServerProcess(how) as server:
        pass
    assert [warning.code for warning in server.warnings] == ["port-held"]


def test_ports_are_free_ones_or_refused_with_their_holder():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        taken = rf"port {port} of 127.0.0.1 is taken by process {psutil.Process().pid} .*--set"
        with pytest.raises(PortTakenError, match=taken):
            choose_port(port)
        assert (wait_free(port, 0.05), is_listening(psutil.Process(), port)) == (False, True)
        with pytest.raises(RunError, match=f"no port from {port} to {port} is free"):
            choose_port(None, range(port, port + 1))
    assert choose_port(port) == port
    first = choose_port(None)
    with socket.create_server(("127.0.0.1", first)):
        assert choose_port(None) != first


def test_a_log_that_is_renamed_or_cut_is_read_on(tmp_path):
    path, renamed = tmp_path / "server.log", tmp_path / "server.log.1"
    with path.open("ab", buffering=0) as writer:
        log = ServerLog(path, Redactor())
        writer.write(b"one\n")
        path.rename(renamed)
        path.write_bytes(b"not the server's\n")
        writer.write(b"two\n")
        assert log.tail() == "one\ntwo"
        renamed.open("wb").close()
        writer.write(b"\x1b[32mloading 10%\r loading 90%\x1b[0m\n\n")
        assert log.last_line() == "loading 90%"
        log.close()


def test_a_line_is_shown_without_colours_with_escapes_and_shortened(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes("\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b31m\u202e\n".encode())
    assert ServerLog(path, Redactor()).last_line() == r"\x1b]0;owned\x07red\x9b31m\u202e"
    path.write_bytes(b"x" * 5_000_000)
    log = ServerLog(path, Redactor())
    assert (log.last_line(), len(log.tail()), len(log.end())) == ("x" * 99 + "…", 16_384, 65_536)


OURS = {
    "0::/jobs/ours": "jobs/ours/memory.events",
    "3:cpu:/\n4:memory:/ours\n0::/": "memory/ours/memory.oom_control",
    "3:cpu:/": None,
}
"""What a process is told of its control groups, and the file of the one that limits its memory."""


def test_a_kill_in_the_control_group_of_the_server_is_a_lack_of_memory_and_one_elsewhere_is_none(tmp_path):
    kills = "low 0\noom 1\noom_kill {}\noom_group_kill 0\n"
    files = {"jobs/others/memory.events", *filter(None, OURS.values())}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
    for listed, ours in OURS.items():
        (tmp_path / "groups").write_text(f"{listed}\n")
        for file in files:
            (tmp_path / file).write_text(kills.format(2))
        shortage = Shortage(tmp_path, groups=tmp_path / "groups", group_files=tmp_path, log_room_bytes=0)
        for file in files - {ours}:
            (tmp_path / file).write_text(kills.format(3))
        assert shortage.diagnosis() is None
        if ours is not None:
            (tmp_path / ours).write_text(kills.format(3))
            assert shortage.diagnosis().cause == "out-of-memory"
    assert Shortage(tmp_path, log_room_bytes=1 << 62).diagnosis().cause == "disk-full"


def saying(tmp_path, program, **options):
    """A server that runs ``program``, and whose log must not hold the secret."""
    how = launch(tmp_path)
    return replace(how, argv=(sys.executable, "-c", program), sent={"TEAM_KEY": SECRET}, port_wait_s=0.1, **options)


def died(how):
    with ServerProcess(how) as server:
        asyncio.run(asyncio.wait_for(server.died(), 60))
    return server


def test_the_last_words_of_a_process_that_is_killed_are_in_the_log_without_secrets(tmp_path):
    program = f"import os, signal; os.write(2, b'fatal: {SECRET}'); os.kill(os.getpid(), signal.SIGKILL)"
    server = died(saying(tmp_path, program))
    assert (tmp_path / "server.log").read_text() == server.log_tail() == f"fatal: {MARK}"
    assert server.redactions == {"TEAM_KEY": 1}
    assert not (tmp_path / "server.raw.log").exists()


@pytest.mark.parametrize("is_kept", [False, True])
def test_while_the_server_runs_its_log_is_raw_and_only_its_owner_may_read_it(tmp_path, is_kept):
    raw, log = tmp_path / "server.raw.log", tmp_path / "server.log"
    program = f"import time; print('key {SECRET}', flush=True); time.sleep(60)"
    with ServerProcess(saying(tmp_path, program, keeps_raw_log=is_kept)) as server:
        wait_until("the line", raw.read_text)
        assert (server.log_tail(), log.exists()) == (f"key {MARK}", False)
        assert raw.stat().st_mode & 0o777 == 0o600
    assert (log.read_text(), raw.exists()) == (f"key {MARK}\n", is_kept)
    assert [warning.code for warning in server.warnings] == ["raw-log-kept"] * is_kept


def test_a_process_that_left_and_writes_on_does_not_hold_up_the_end(tmp_path):
    program = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    assert died(saying(tmp_path, program)).warnings == ()


def test_signals_that_end_benchctl_end_neither_supervisor_nor_server_and_no_secret_is_in_its_words(tmp_path):
    with ServerProcess(saying(tmp_path, "import time; time.sleep(60)")) as server:
        assert SECRET not in " ".join(psutil.Process(server._process.supervisor_pid).cmdline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(server._process.supervisor_pid, number)
            server.check_alive()


def test_the_server_inherits_no_signal_that_is_ignored(tmp_path):
    handlers = "from signal import *; print(*map(getsignal, (SIGTERM, SIGHUP, SIGCHLD)), sep='\\n')"
    died(saying(tmp_path, handlers))
    assert set((tmp_path / "server.log").read_text().splitlines()) == {str(signal.SIG_DFL)}


def test_a_log_that_cannot_be_opened_or_is_a_link_is_told_and_nothing_runs(tmp_path):
    raw, elsewhere = tmp_path / "server.raw.log", tmp_path / "elsewhere"
    for make, unmake in ((raw.mkdir, raw.rmdir), (lambda: raw.symlink_to(elsewhere), raw.unlink)):
        make()
        before = psutil.Process().children()
        with pytest.raises(ServerStartError, match="the log of the server cannot be begun"):
            ServerProcess(launch(tmp_path)).__enter__()
        assert (psutil.Process().children(), elsewhere.exists()) == (before, False)
        unmake()


def test_a_log_that_cannot_be_written_at_the_end_is_a_warning(tmp_path):
    (tmp_path / "server.log").mkdir()
    server = died(saying(tmp_path, "print('farewell')"))
    assert [warning.code for warning in server.warnings] == ["server-log-incomplete"]
    assert server.log_tail() == "farewell"


def test_the_supervisor_needs_nothing_that_is_installed():
    program = (
        f"import runpy, sys; runpy.run_path({supervise.__file__!r}, run_name='supervise'); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert not {name for name in done.stdout.split() if name.partition(".")[0] == "benchctl"}
    assert Path(supervise.__file__).name == "supervise.py"
