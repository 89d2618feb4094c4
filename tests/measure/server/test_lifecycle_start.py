"""The start of a server: what is heard while it lasts, and every way in which it does not end well."""

import socket
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
from benchctl.measure.server.health import ServerLog, Shortage
from benchctl.measure.server.process import choose_port, is_alive, is_free, is_listening, port_holder, wait_free
from benchctl.measure.server.server import ServerProcess
from benchctl.untrusted.secrets import Redactor


def start(how):
    with up(how):
        pass


def test_a_server_that_was_started_is_ready_and_then_gone_and_what_it_said_was_passed_on(tmp_path):
    heard = []
    how = replace(launch(tmp_path, "--start-delay-s", "0.3"), on_log_line=heard.append)
    with up(how) as server:
        pid, ready_ns = server.pid, time.monotonic_ns()
        server.check_alive()
        assert not is_free(how.port)
        assert port_holder(how.port).pid == pid
    assert server.launch_ns < ready_ns < server.stop_ns
    assert not psutil.pid_exists(pid)
    assert is_free(how.port)
    assert server.warnings == ()
    assert "paced server listening" in how.log.read_text()
    assert "paced server starting" in heard
    assert set(heard) <= {"paced server starting", "paced server listening"}


LINES = "\n".join([*(f"line {i}" for i in range(30)), "CUDA out of memory"])


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
    how, began_s = launch(tmp_path, *flags, ready_s=1.0 if cause == "not-ready" else 60.0), time.monotonic()
    with pytest.raises(ServerStartError, match=message) as caught:
        start(how)
    assert time.monotonic() - began_s < 20
    assert (caught.value.cause, caught.value.is_profile_error) == (cause, cause == "bad-flag")
    assert is_free(how.port)
    if LINES in flags:
        tail = caught.value.log_tail.splitlines()
        assert (len(tail), tail[-1]) == (20, "CUDA out of memory")
        assert str(how.log) in str(caught.value)


def test_a_program_that_does_not_exist_is_a_start_error(tmp_path):
    how = replace(launch(tmp_path), argv=("no-such-engine", "--port", "1"))
    message = r"'no-such-engine' cannot be started: .*install the engine"
    with pytest.raises(ServerStartError, match=message) as caught:
        start(how)
    assert caught.value.cause == "cannot-start"


def test_a_child_that_serves_is_the_server_s_own_while_its_parent_lives_and_an_orphan_after(tmp_path):
    how = launch(tmp_path, "--serve-from-child", "stay", "--leave-after-s", "0")
    with up(how) as server:
        child = wait_until("the child", lambda: psutil.Process(server.pid).children())[0]
        psutil.Process(server.pid).kill()
    assert not is_alive(child)
    assert is_free(how.port)
    assert server.warnings == ()
    how = launch(tmp_path, "--serve-from-child", "leave", "--leave-after-s", "0")
    with pytest.raises(ServerStartError, match="the server ended with exit code 0 before it was ready"):
        start(how)
    assert is_free(how.port)


def test_an_orphan_of_an_earlier_run_that_answers_is_not_taken_for_a_server_that_still_loads(tmp_path):
    (tmp_path / "orphan").mkdir()
    with running(tmp_path / "orphan") as orphan:
        loading = replace(orphan, argv=(*orphan.argv, "--start-delay-s", "60"), log=tmp_path / "server.log")
        loading = replace(loading, port_wait_s=0.0)
        with pytest.raises(ServerStartError, match="by a process that is not the server just started") as caught:
            start(loading)
    assert caught.value.cause == "port-taken"
    assert is_free(orphan.port)


def test_an_engine_process_that_dies_before_the_server_is_ready_ends_the_start(tmp_path):
    how = launch(tmp_path, "--core", "stay", "--never-ready", ready_s=60.0)

    def kill_core():
        time.sleep(1.5)  # two looks, by which it is known as an engine process
        children = [child for process in processes_of(str(tmp_path)) for child in process.children()]
        next(child for child in children if CORE in child.cmdline()).kill()

    threading.Thread(target=kill_core).start()
    with pytest.raises(ServerStartError, match=f"{CORE}.* has gone before it was ready") as caught:
        start(how)
    assert "engine core died" in caught.value.log_tail


def test_a_port_that_stays_held_is_a_warning(tmp_path):
    how = launch(tmp_path)
    sleeper = replace(how, argv=(sys.executable, "-c", "import time; time.sleep(60)"), port_wait_s=0.1)
    with ServerProcess(sleeper) as server, socket.create_server(("127.0.0.1", how.port)):
        server.stop()
    assert [warning.code for warning in server.warnings] == ["port-held"]


def test_ports_are_free_ones_or_refused_with_their_holder():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        taken = rf"port {port} of 127.0.0.1 is taken by process {psutil.Process().pid} .*--set"
        with pytest.raises(PortTakenError, match=taken):
            choose_port(port)
        assert not wait_free(port, 0.05)
        assert is_listening(psutil.Process(), port)
        with pytest.raises(RunError, match=f"no port from {port} to {port} is free"):
            choose_port(None, range(port, port + 1))
    assert choose_port(port) == port
    first = choose_port(None)
    with socket.create_server(("127.0.0.1", first)):
        assert choose_port(None) != first


def test_a_log_that_is_renamed_cut_or_deleted_is_read_on(tmp_path):
    path = tmp_path / "server.log"
    with path.open("ab", buffering=0) as writer:
        log = ServerLog(path, Redactor())
        assert (log.tail(), log.last_line()) == ("", "")
        writer.write(b"one\n")
        path.rename(tmp_path / "server.log.1")
        path.write_bytes(b"not the server's\n")
        writer.write(b"two\n")
        assert log.tail() == "one\ntwo"
        (tmp_path / "server.log.1").open("wb").close()
        writer.write(b"three\n")
        assert log.tail() == "three"
        (tmp_path / "server.log.1").unlink()
        writer.write(b"\x1b[32mloading 10%\r loading 90%\x1b[0m\n\n")
        assert log.last_line() == "loading 90%"
        log.close()
        writer.write(b"more\n")
        assert log.tail().endswith("loading 90%\x1b[0m\n")


def test_a_line_is_shown_without_colours_with_escapes_and_shortened(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes("\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b31m\u202e\n".encode())
    assert ServerLog(path, Redactor()).last_line() == r"\x1b]0;owned\x07red\x9b31m\u202e"
    path.write_bytes(b"x" * 5_000_000)
    log = ServerLog(path, Redactor())
    assert (log.last_line(), len(log.tail()), len(log.end())) == ("x" * 99 + "…", 16_384, 65_536)
    log.close()


def test_a_disk_without_room_for_a_log_is_the_cause(tmp_path):
    assert Shortage(tmp_path, log_room_bytes=1 << 62).diagnosis().cause == "disk-full"


OURS = {
    "0::/jobs/ours": "jobs/ours/memory.events",
    "3:cpu:/\n4:memory:/ours\n0::/": "memory/ours/memory.oom_control",
    "3:cpu:/": None,
}
"""What a process is told of its control groups, and the file of the one that limits its memory."""


def test_a_kill_in_the_control_group_of_the_server_is_a_lack_of_memory_and_one_elsewhere_is_none(
    tmp_path: Path,
) -> None:
    for number, (listed, file) in enumerate(OURS.items()):
        directory = tmp_path / str(number)
        files = [directory / each for each in ("jobs/others/memory.events", *filter(None, OURS.values()))]
        for path in files:
            path.parent.mkdir(parents=True)
            path.write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
        (directory / "groups").write_text(f"{listed}\n")
        shortage = Shortage(directory, groups=directory / "groups", group_files=directory, log_room_bytes=0)
        for path in sorted(files, key=lambda path: str(path).endswith(file or "-")):
            assert shortage.diagnosis() is None
            path.write_text("low 0\noom 1\noom_kill 3\noom_group_kill 0\n")
        found = shortage.diagnosis()
        assert (found and found.cause) == (file and "out-of-memory")
