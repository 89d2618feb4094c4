"""The log of a server: raw while it runs, without secrets when it has ended, however it did."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.servers.stubborn_engine import launch
from support.waiting import wait_until

from benchctl.errors import ServerStartError
from benchctl.measure.server import supervise
from benchctl.measure.server.process import Supervised, is_alive
from benchctl.measure.server.server import ServerProcess
from benchctl.measure.server.supervise import Launched

SECRET = "opensesame-4711-opensesame"
MARK = "[redacted: TEAM_KEY]"


def saying(tmp_path, program, **options):
    """A server that runs ``program``, and whose log must not hold the secret."""
    how = launch(tmp_path)
    return replace(how, argv=(sys.executable, "-c", program), sent={"TEAM_KEY": SECRET}, port_wait_s=0.1, **options)


def died(how):
    with ServerProcess(how) as server:
        asyncio.run(asyncio.wait_for(server.died(), 10))
    return server


def test_the_last_words_of_a_process_that_is_killed_are_in_the_log_without_secrets(tmp_path):
    program = f"import os, signal; os.write(2, b'fatal: {SECRET}'); os.kill(os.getpid(), signal.SIGKILL)"
    server = died(saying(tmp_path, program))
    assert (tmp_path / "server.log").read_text() == f"fatal: {MARK}"
    assert server.redactions == {"TEAM_KEY": 1}
    assert server.log_tail() == f"fatal: {MARK}"
    assert not (tmp_path / "server.raw.log").exists()


@pytest.mark.parametrize("is_kept", [False, True])
def test_while_the_server_runs_its_log_is_raw_and_only_its_owner_may_read_it(tmp_path, is_kept):
    raw = tmp_path / "server.raw.log"
    program = f"import time; print('key {SECRET}', flush=True); time.sleep(60)"
    with ServerProcess(saying(tmp_path, program, keeps_raw_log=is_kept)) as server:
        wait_until("the line", raw.read_text)
        assert server.log_tail() == f"key {MARK}"
        assert raw.stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / "server.log").exists()
    assert (tmp_path / "server.log").read_text() == f"key {MARK}\n"
    assert raw.exists() == is_kept
    assert [warning.code for warning in server.warnings] == (["raw-log-kept"] if is_kept else [])


def test_a_process_that_left_and_writes_on_does_not_hold_up_the_end(tmp_path):
    program = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    server = died(saying(tmp_path, program))
    assert server.warnings == ()
    assert (tmp_path / "server.log").read_text() == ""


def test_signals_that_end_benchctl_end_neither_supervisor_nor_server_and_no_secret_is_in_its_words(tmp_path):
    with ServerProcess(saying(tmp_path, "import time; time.sleep(60)")) as server:
        assert SECRET not in " ".join(psutil.Process(server._process.supervisor_pid).cmdline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(server._process.supervisor_pid, number)
            server.check_alive()
            assert is_alive(psutil.Process(server.pid))


def test_the_server_inherits_no_signal_that_is_ignored(tmp_path):
    handlers = "from signal import *; print(*map(getsignal, (SIGTERM, SIGHUP, SIGCHLD)), sep='\\n')"
    died(saying(tmp_path, handlers))
    assert set((tmp_path / "server.log").read_text().splitlines()) == {str(signal.SIG_DFL)}


def test_a_log_that_cannot_be_opened_or_is_a_link_is_told_and_nothing_runs(tmp_path):
    raw = tmp_path / "server.raw.log"
    for make, unmake in (
        (raw.mkdir, raw.rmdir),
        (lambda: raw.symlink_to(tmp_path / "elsewhere"), raw.unlink),
    ):
        make()
        before = psutil.Process().children()
        with pytest.raises(ServerStartError, match="the log of the server cannot be begun"):
            ServerProcess(launch(tmp_path)).__enter__()
        assert psutil.Process().children() == before
        assert not (tmp_path / "elsewhere").exists()
        unmake()


def test_a_log_that_cannot_be_written_at_the_end_is_a_warning(tmp_path):
    (tmp_path / "server.log").mkdir()
    server = died(saying(tmp_path, "print('farewell')"))
    assert [warning.code for warning in server.warnings] == ["server-log-incomplete"]
    assert server.log_tail() == "farewell"
    assert not (tmp_path / "server.raw.log").exists()


def test_a_benchctl_that_is_killed_leaves_a_log_without_secrets(tmp_path):
    raw, log = tmp_path / "server.raw.log", tmp_path / "server.log"
    program = f"import time; print('key {SECRET}', flush=True); time.sleep(60)"
    launched = Launched(
        argv=(sys.executable, "-c", program),
        env=dict(os.environ),
        raw_log=str(raw),
        log=str(log),
        sent={"TEAM_KEY": SECRET},
    )
    server = Supervised(launched)
    wait_until("the line", raw.read_text)
    server._supervisor.stdin.close()  # as the kernel does when we are killed
    assert server._supervisor.wait(10) == 0
    server._supervisor.stdout.close()
    assert not psutil.pid_exists(server.pid)
    assert log.read_text() == f"key {MARK}\n"
    assert not raw.exists()


def test_the_supervisor_needs_nothing_that_is_installed():
    program = (
        f"import runpy, sys; runpy.run_path({supervise.__file__!r}, run_name='supervise'); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert not {name for name in done.stdout.split() if name.partition(".")[0] == "benchctl"}
    assert Path(supervise.__file__).name == "supervise.py"
