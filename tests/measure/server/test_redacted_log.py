"""The log of a server is written without secrets by a process of its own, which outlives nobody."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from support.servers.stubborn_engine import launch, wait_until

from benchctl.errors import ServerDiedError, ServerStartError
from benchctl.load.client import StreamClient
from benchctl.measure.server.process import is_alive
from benchctl.measure.server.redacted_log import RedactedLog
from benchctl.measure.server.server import ServerProcess
from benchctl.untrusted.secrets import KnownValue, Redactor

SECRET = "opensesame-4711-opensesame"
REDACTOR = Redactor([KnownValue("TEAM_KEY", SECRET.encode())])
MARK = b"[redacted: TEAM_KEY]"


@pytest.fixture
def log(tmp_path):
    """A log that nobody writes to yet."""
    log = RedactedLog(tmp_path / "server.log", REDACTOR)
    yield log
    log.close(0.0)


def filter_of(log):
    return psutil.Process(log._filter.pid)


async def ready(server, how):
    async with StreamClient(how.base_url, how.timeouts) as client:
        return await server.wait_ready(client.control)


def test_the_last_words_of_a_process_that_is_killed_are_in_the_log_without_secrets(tmp_path, log):
    program = f"import os, signal; os.write(2, b'fatal: {SECRET}'); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", program], stdout=log.output, stderr=log.output, check=False)
    log.started()
    log.close()
    assert (tmp_path / "server.log").read_bytes() == b"fatal: " + MARK
    assert log.counts == {"TEAM_KEY": 1}
    assert not log.has_failed()


def test_a_secret_in_two_writes_is_one(tmp_path, log):
    path = tmp_path / "server.log"
    os.write(log.output, f"loading 50%\r with {SECRET[:12]}".encode())
    wait_until("the beginning", lambda: path.read_bytes() == b"loading 50%\r", 2)
    os.write(log.output, f"{SECRET[12:]}\n".encode())
    wait_until("the line", lambda: path.read_bytes() == b"loading 50%\r with " + MARK + b"\n", 2)


def test_what_has_been_written_is_in_the_log_after_a_sync(tmp_path, log):
    for number in range(20):
        os.write(log.output, f"{number} {SECRET}\n".encode())
        log.sync()
        assert (tmp_path / "server.log").read_bytes().endswith(f"{number} ".encode() + MARK + b"\n")


def test_a_command_that_comes_before_the_filter_has_started_is_carried_out(tmp_path, log):
    filter_of(log).suspend()
    os.write(log.output, b"one\n")
    assert log._tell("sync 7\n")
    filter_of(log).resume()
    wait_until("the line", lambda: (tmp_path / "server.log").read_bytes() == b"one\n")
    log._take_answers(10.0, until=b"synced 7\n")
    assert b"synced 7\n" in log._answers


def test_the_raw_log_is_kept_on_request_and_only_its_owner_may_read_it(tmp_path):
    raw = tmp_path / "server.raw.log"
    log = RedactedLog(tmp_path / "server.log", REDACTOR, raw=raw)
    os.write(log.output, f"key {SECRET}\n".encode())
    log.close()
    assert raw.read_text() == f"key {SECRET}\n"
    assert raw.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "server.log").read_bytes() == b"key " + MARK + b"\n"


def test_no_secret_is_in_the_command_line_or_the_environment_of_the_filter(log):
    process = filter_of(log)
    assert SECRET not in " ".join(process.cmdline()) + str(process.environ())


def test_a_process_that_keeps_the_pipe_open_does_not_hold_up_the_end(tmp_path, log):
    os.write(log.output, f"a daemon begins with {SECRET}".encode())
    with subprocess.Popen(["sleep", "60"], stdout=log.output, start_new_session=True) as daemon:
        began, process = time.monotonic(), filter_of(log)
        log.close(0.3)
        assert time.monotonic() - began < 2
        assert not is_alive(process)
        daemon.kill()
    assert (tmp_path / "server.log").read_bytes() == b"a daemon begins with " + MARK
    assert log.counts == {"TEAM_KEY": 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_benchctl_do_not_end_the_log(tmp_path, log, number):
    os.write(log.output, b"one\n")
    log.sync()
    filter_of(log).send_signal(number)
    os.write(log.output, b"two\n")
    log.close()
    assert (tmp_path / "server.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("moment", ["before it was ready", "in mid-run"])
def test_a_server_whose_log_is_lost_is_ended_and_the_reason_is_told(tmp_path, moment):
    how = launch(tmp_path, *(["--start-delay-s", "60"] if moment == "before it was ready" else []), ready_s=60.0)

    async def lose_log(server):
        if moment == "in mid-run":
            await ready(server, how)
            os.kill(server._output._filter.pid, signal.SIGKILL)
            await asyncio.wait_for(server.died(), 5)
            server.check_alive()
        asyncio.get_running_loop().call_later(0.5, os.kill, server._output._filter.pid, signal.SIGKILL)
        await ready(server, how)

    def lose_it():
        with ServerProcess(how) as server:
            family.extend([psutil.Process(server.pid), psutil.Process(server._output._filter.pid)])
            servers.append(server)
            asyncio.run(lose_log(server))

    family, servers = [], []
    with pytest.raises((ServerDiedError, ServerStartError), match=rf"was ended by SIGKILL {moment}; look"):
        lose_it()
    assert not any(map(is_alive, family))
    assert [warning.code for warning in servers[0].warnings] == ["server-log-incomplete"]


def test_a_log_whose_process_is_stopped_at_the_end_fails_the_run_with_the_reason(tmp_path):
    def stop_the_log():
        with ServerProcess(launch(tmp_path)) as server:
            asyncio.run(ready(server, server._launch))
            servers.append(server)
            family.extend([psutil.Process(server.pid), psutil.Process(server._output._filter.pid)])
            family[1].suspend()

    family, servers = [], []
    with pytest.raises(ServerDiedError, match="stopped or too slow: it did not end in time; look") as caught:
        stop_the_log()
    assert caught.value.cause == "log-lost"
    assert not any(map(is_alive, family))
    assert [warning.code for warning in servers[0].warnings] == ["server-log-incomplete"]


def test_a_server_that_writes_fast_gets_its_whole_log_in_order(tmp_path):
    log = RedactedLog(tmp_path / "server.log", REDACTOR)
    program = f"for n in range(200_000): print(n, 'line of a log', '{SECRET}' if n % 1000 == 0 else '')"
    subprocess.run([sys.executable, "-c", program], stdout=log.output, check=True)
    log.close(20)
    lines = (tmp_path / "server.log").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(200_000))
    assert log.counts == {"TEAM_KEY": 200}


def test_the_filter_of_a_log_that_cannot_be_opened_is_not_started(tmp_path):
    before = psutil.Process().children()
    how = replace(launch(tmp_path), log=tmp_path / "absent" / "server.log")
    (tmp_path / "absent").write_text("a file")
    with pytest.raises((ServerStartError, OSError)), ServerProcess(how):
        pass
    assert psutil.Process().children() == before
