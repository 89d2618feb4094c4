"""The start of a server: what is heard while it lasts, and every way in which it does not end well."""

import asyncio
import time
from dataclasses import replace

import psutil
import pytest
from support.servers.stubborn_engine import CORE, launch, wait_until

from benchctl.errors import ServerStartError
from benchctl.load.client import StreamClient
from benchctl.measure.server.health import ServerLog, Shortage
from benchctl.measure.server.process import is_alive, is_free
from benchctl.measure.server.server import ServerProcess
from benchctl.untrusted.secrets import Redactor


async def wait_ready(server, how):
    async with StreamClient(how.base_url, how.timeouts) as client:
        return await server.wait_ready(client.control)


def start(how):
    with ServerProcess(how) as server:
        asyncio.run(wait_ready(server, how))


def test_what_a_starting_server_says_is_passed_on(tmp_path):
    heard = []
    start(replace(launch(tmp_path, "--start-delay-s", "0.8"), on_log_line=heard.append))
    assert "paced server starting" in heard
    assert set(heard) <= {"paced server starting", "paced server listening"}


def test_a_server_that_says_it_will_never_serve_and_lives_on_is_ended_at_once(tmp_path):
    how = launch(tmp_path, "--port-taken", ready_s=60.0)
    began = time.monotonic()
    with pytest.raises(ServerStartError, match=r"is alive but will never be ready \(port-taken\)") as caught:
        start(how)
    assert caught.value.cause == "port-taken"
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("habit", ["leave", "stay"])
def test_a_child_that_serves_is_the_server_s_own_while_its_parent_lives_and_an_orphan_after(tmp_path, habit):
    how = launch(tmp_path, "--serve-from-child", habit, "--leave-after-s", "0")
    if habit == "stay":
        start(how)
    else:
        with pytest.raises(ServerStartError, match="the server ended with exit code 0 before it was ready"):
            start(how)
    assert is_free(how.port)


def test_an_orphan_of_an_earlier_run_that_answers_is_not_taken_for_a_server_that_still_loads(tmp_path):
    (tmp_path / "orphan").mkdir()
    orphan = launch(tmp_path / "orphan")
    with ServerProcess(orphan) as other:
        asyncio.run(wait_ready(other, orphan))
        argv = tuple(str(orphan.port) if part == str(orphan.port) else part for part in orphan.argv)
        loading = replace(orphan, argv=(*argv, "--start-delay-s", "60"), log=tmp_path / "server.log")
        with ServerProcess(loading) as server:
            with pytest.raises(ServerStartError, match="answered by a process that is not the server just started"):
                asyncio.run(wait_ready(server, loading))
            other.stop()
    assert is_free(orphan.port)


def test_an_engine_process_that_dies_before_the_server_is_ready_ends_the_start(tmp_path):
    how = launch(tmp_path, "--core", "stay", "--never-ready", ready_s=60.0)

    async def kill_core(server):
        waiting = asyncio.create_task(wait_ready(server, how))
        await asyncio.sleep(1.5)  # two looks, by which it is known as an engine process
        (core,) = [process for process in server.processes() if CORE in process.cmdline()]
        core.kill()
        await waiting

    with ServerProcess(how) as server, pytest.raises(ServerStartError) as caught:
        asyncio.run(kill_core(server))
    assert CORE in str(caught.value)
    assert "has gone before it was ready" in str(caught.value)
    assert "engine core died" in caught.value.log_tail


def test_a_start_that_takes_too_long_is_told_with_the_last_line_of_the_log(tmp_path):
    how = launch(tmp_path, "--start-delay-s", "60", "--chatter-bytes", "5000000", ready_s=1.0)
    with pytest.raises(ServerStartError, match=r"not ready within 1 s: .*, its log ends 'paced server starting'"):
        start(how)


def test_a_fault_of_the_profile_is_marked_as_one(tmp_path):
    with pytest.raises(ServerStartError, match=r"\(bad-flag\); correct the flag") as caught:
        start(launch(tmp_path, "--die-saying", "error: unrecognized arguments: --frobnicate"))
    assert caught.value.is_profile_error
    with pytest.raises(ServerStartError) as caught:
        start(launch(tmp_path, "--die-saying", "CUDA out of memory"))
    assert (caught.value.cause, caught.value.is_profile_error) == ("out-of-memory", False)


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


def test_a_line_with_control_characters_is_shown_without_colours_and_with_escapes(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes("\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b31m\u202e\n".encode())
    assert ServerLog(path, Redactor()).last_line() == r"\x1b]0;owned\x07red\x9b31m\u202e"


def test_a_line_of_megabytes_is_shown_by_its_end_and_shortened(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(b"x" * 5_000_000)
    log = ServerLog(path, Redactor())
    assert log.last_line() == "x" * 99 + "…"
    assert len(log.tail()) == 16_384
    assert len(log.end()) == 65_536
    log.close()


def test_a_disk_without_room_for_a_log_is_the_cause(tmp_path):
    shortage = Shortage(tmp_path, log_room_bytes=1 << 62)
    assert shortage.diagnosis().cause == "disk-full"


def test_stopping_while_a_child_holds_the_port_frees_it(tmp_path):
    how = launch(tmp_path, "--serve-from-child", "stay")
    with ServerProcess(how) as server:
        asyncio.run(wait_ready(server, how))
        child = wait_until("the child", lambda: psutil.Process(server.pid).children())[0]
        psutil.Process(server.pid).kill()
    assert not is_alive(child)
    assert is_free(how.port)
    assert server.warnings == ()
