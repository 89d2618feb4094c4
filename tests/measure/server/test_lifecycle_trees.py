"""Whatever family a server has, nothing of it stays: no process, no shared memory, whoever is killed first."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.servers.paced_engine import up
from support.servers.stubborn_engine import CORE, launch
from support.waiting import wait_until

from benchctl.errors import ServerDiedError
from benchctl.measure.server.process import Supervised, descendants, is_alive
from benchctl.measure.server.server import ServerProcess
from benchctl.measure.server.supervise import Launched

SHARED = Path("/dev/shm")


def reap_orphans():
    """Take leave of what was handed to us, as the process that started the servers before, and has ended."""
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, 0)


def runaway_of(log):
    said = re.search(r"runaway (\d+)\n", log.read_text())  # perhaps within a line of its server
    return psutil.Process(int(said[1])) if said else None


@pytest.mark.parametrize("leader_dies", [False, True])
def test_descendants_and_shared_memory_go_with_a_server_that_ends_or_is_killed_and_those_of_others_stay(
    tmp_path, leader_dies
):
    name, others = f"psm_{os.getpid()}_{tmp_path.name}", SHARED / f"psm_other_{os.getpid()}_{tmp_path.name}"
    how = launch(tmp_path, "--runaway", "--with-worker", "--ignore-term", "--segment", name, stop_s=0.3)
    try:
        with up(how) as server:
            runaway = wait_until("a runaway", lambda: runaway_of(how.raw_log))
            leader, members = psutil.Process(server.pid), server.processes()
            assert len(members) == 3
            assert os.getsid(runaway.pid) != leader.pid
            assert runaway not in leader.children(recursive=True)
            others.write_bytes(b"not a server's")
            assert (SHARED / name).exists()
            if leader_dies:
                leader.kill()
        assert not any(is_alive(member) for member in (*members, runaway))
        assert ((SHARED / name).exists(), others.exists()) == (False, True)
        assert server.warnings == ()
    finally:
        others.unlink(missing_ok=True)
        (SHARED / name).unlink(missing_ok=True)


def test_a_runaway_of_a_server_that_dies_at_once_is_ended_although_nobody_saw_it_leave(tmp_path):
    how = launch(tmp_path, "--runaway", "--die-saying", "farewell")
    with ServerProcess(how) as server:
        runaway = wait_until("a runaway", lambda: runaway_of(how.raw_log))
        asyncio.run(asyncio.wait_for(server.died(), 10))
        assert is_alive(runaway)
    assert not is_alive(runaway)


LATE_LEAVER = "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *_: os.setsid()); "
LATE_LEAVER += "print('leaver', os.getpid(), flush=True); time.sleep(300)"
ITS_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LATE_LEAVER!r}])"


def test_who_leaves_the_session_after_it_was_seen_is_ended_with_a_benchctl_that_is_killed(tmp_path):
    log = tmp_path / "log"
    family = Supervised(Launched(argv=(sys.executable, "-c", ITS_PARENT), env=dict(os.environ), raw_log=str(log)))
    said = wait_until("the leaver", lambda: log.read_text().split()[1:])
    leaver = psutil.Process(int(said[0]))
    assert leaver in descendants(family.supervisor_pid)
    leaver.send_signal(signal.SIGUSR1)
    wait_until("a session of its own", lambda: os.getsid(leaver.pid) == leaver.pid)
    psutil.Process(family.pid).kill()
    family._supervisor.stdin.close()  # as the kernel does when we are killed
    wait_until("its end", lambda: not is_alive(leaver))
    family._supervisor.wait(10)
    family._supervisor.stdout.close()


def test_a_supervisor_that_is_killed_takes_the_server_along_and_the_log_is_written(tmp_path):
    how = launch(tmp_path)
    with up(how) as server:
        leader = psutil.Process(server.pid)
        psutil.Process(server._process.supervisor_pid).kill()
        asyncio.run(asyncio.wait_for(server.died(), 10))
        with pytest.raises(ServerDiedError, match="supervises the server was ended by SIGKILL in mid-run"):
            server.check_alive()
    assert not is_alive(leader)
    assert "paced server listening" in how.log.read_text()
    assert not how.raw_log.exists()


def test_two_servers_in_one_program_do_not_end_each_other(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with up(launch(tmp_path / "one")) as first, up(launch(tmp_path / "other")) as second:
        first.stop()
        second.check_alive()
    assert second.warnings == ()


MEASURE = """
import sys, time
from pathlib import Path
from support.servers.paced_engine import up
from support.servers.stubborn_engine import launch

with up(launch(Path(sys.argv[1]), *sys.argv[2:])) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.skipif(sys.platform != "linux", reason="reads the table of processes that only Linux has")
def test_a_benchctl_that_is_killed_takes_the_whole_family_of_its_server_along(tmp_path, is_stopped):
    here = str(Path(__file__).parents[2])
    script = f"import sys; sys.path.insert(0, {here!r})\n{MEASURE}"
    name = f"psm_guarded_{os.getpid()}_{tmp_path.name}"
    flags = ["--core", "stay", "--runaway", "--ignore-term", "--segment", name]
    benchctl = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), *flags], stdout=subprocess.PIPE)
    try:
        leader = psutil.Process(int(benchctl.stdout.readline()))
        family = [leader, *leader.children(recursive=True), runaway_of(tmp_path / "server.raw.log")]
        assert len(family) == 3
        assert any(CORE in process.cmdline() for process in family)
        (supervisor,) = psutil.Process(benchctl.pid).children()
        if is_stopped:
            leader.send_signal(signal.SIGSTOP)
        benchctl.kill()
        gone = lambda: not any(is_alive(process) for process in [*family, supervisor])  # noqa: E731
        wait_until("the end of all", gone, 5)
        wait_until("the end of shared memory", lambda: not (SHARED / name).exists(), 5)
    finally:
        benchctl.kill()
        benchctl.communicate()
        reap_orphans()
        (SHARED / name).unlink(missing_ok=True)


def test_a_process_whose_first_thread_has_ended_lives_as_long_as_the_others_do(tmp_path):
    program = tmp_path / "headless.py"
    program.write_text(
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(20,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, str(program)]) as started:
        process = psutil.Process(started.pid)
        wait_until("the end of its first thread", lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert is_alive(process)
        started.kill()
        started.wait(10)
        assert not is_alive(process)
