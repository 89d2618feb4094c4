"""The server's process: ready, not ready, dying, and always gone afterwards."""

import asyncio
import socket
import sys
from dataclasses import replace

import psutil
import pytest
from support.servers.paced_engine import launch

from benchctl.errors import PortTakenError, RunError, ServerDiedError, ServerStartError
from benchctl.load.client import StreamClient
from benchctl.measure.server.process import choose_port, is_alive, is_free, is_listening, port_holder, wait_free
from benchctl.measure.server.server import ServerProcess


def ready(server, how):
    async def wait():
        async with StreamClient(how.base_url, how.timeouts) as client:
            return await server.wait_ready(client.control)

    return asyncio.run(wait())


def start(how):
    with ServerProcess(how) as server:
        ready(server, how)


def test_a_server_that_was_started_is_ready_and_then_gone(tmp_path):
    how = launch(tmp_path)
    with ServerProcess(how) as server:
        ready_ns = ready(server, how)
        pid = server.pid
        server.check_alive()
        assert not is_free(how.port)
        holder = port_holder(how.port)
        assert holder is not None
        assert holder.pid == pid
    assert server.launch_ns < ready_ns < server.stop_ns
    assert not psutil.pid_exists(pid)
    assert is_free(how.port)
    assert server.warnings == ()
    assert "paced server listening" in how.log.read_text()


def test_the_workers_of_a_server_go_with_it_even_when_it_ignores_the_polite_signal(tmp_path):
    how = launch(tmp_path, "--with-worker", "--ignore-term", stop_s=0.3)
    with ServerProcess(how) as server:
        ready(server, how)
        members = server.processes()
    assert len(members) == 2
    assert not any(is_alive(member) for member in members)


def test_orphans_of_a_killed_server_are_ended_too(tmp_path):
    how = launch(tmp_path, "--with-worker")
    with ServerProcess(how) as server:
        ready(server, how)
        members = server.processes()
        psutil.Process(server.pid).kill()
        asyncio.run(asyncio.wait_for(server.died(), 5))
    assert len(members) == 2
    assert not any(is_alive(member) for member in members)


def test_a_server_that_never_becomes_ready_is_given_up_in_time(tmp_path):
    how = launch(tmp_path, "--never-ready", ready_s=2.0)
    with pytest.raises(
        ServerStartError,
        match=r"not ready within 2 s: GET /health answered 503, its log ends 'paced server listening'; "
        "raise timeouts.ready_s",
    ) as caught:
        start(how)
    assert caught.value.cause == "not-ready"
    assert is_free(how.port)


def test_a_server_that_dies_at_its_start_fails_at_once_with_cause_remedy_and_the_end_of_its_log(tmp_path):
    saying = "\n".join([*(f"line {i}" for i in range(30)), "OSError: [Errno 98] address already in use"])
    how = launch(tmp_path, "--die-saying", saying, ready_s=60.0)
    with pytest.raises(ServerStartError) as caught:
        start(how)
    message, tail = str(caught.value), caught.value.log_tail.splitlines()
    assert "ended with exit code 1 before it was ready (port-taken); choose another port" in message
    assert str(how.log) in message
    assert caught.value.cause == "port-taken"
    assert len(tail) == 20
    assert tail[-1] == "OSError: [Errno 98] address already in use"


def test_an_unknown_death_names_the_log_as_the_place_to_look(tmp_path):
    how = launch(tmp_path, "--die-saying", "so long")
    with pytest.raises(ServerStartError, match="exit code 1 before it was ready; its log says why") as caught:
        start(how)
    assert caught.value.cause == "server-died"


def test_a_program_that_does_not_exist_is_a_start_error(tmp_path):
    how = replace(launch(tmp_path), argv=("no-such-engine", "--port", "1"))
    with pytest.raises(
        ServerStartError, match=r"'no-such-engine' cannot be started: .*install the engine"
    ) as caught:
        ServerProcess(how).__enter__()
    assert caught.value.cause == "cannot-start"


def test_a_stranger_that_answers_on_the_port_is_not_taken_for_the_server(tmp_path):
    (tmp_path / "orphan").mkdir()
    orphan = launch(tmp_path / "orphan")
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    with ServerProcess(orphan) as other:
        ready(other, orphan)
        how = replace(orphan, argv=sleeper, log=tmp_path / "server.log", port_wait_s=0.0)
        with pytest.raises(ServerStartError, match="by a process that is not the server just started") as caught:
            start(how)
    assert caught.value.cause == "port-taken"


def test_a_death_in_mid_run_is_told_with_its_signal(tmp_path):
    how = launch(tmp_path)
    with ServerProcess(how) as server:
        ready(server, how)
        psutil.Process(server.pid).kill()
        asyncio.run(asyncio.wait_for(server.died(), 5))
        with pytest.raises(ServerDiedError, match="was ended by SIGKILL in mid-run") as caught:
            server.check_alive()
    assert caught.value.cause == "server-died"
    assert "paced server listening" in caught.value.log_tail


def test_a_port_that_stays_held_is_a_warning(tmp_path):
    how = launch(tmp_path)
    sleeper = replace(how, argv=(sys.executable, "-c", "import time; time.sleep(60)"), port_wait_s=0.1)
    with ServerProcess(sleeper) as server, socket.create_server(("127.0.0.1", how.port)):
        server.stop()
    assert [warning.code for warning in server.warnings] == ["port-held"]


def test_a_fixed_port_that_is_taken_is_refused_naming_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(
            PortTakenError, match=rf"port {port} of 127.0.0.1 is taken by process {psutil.Process().pid} .*--set"
        ):
            choose_port(port)
        assert not wait_free(port, 0.05)
        assert is_listening(psutil.Process(), port)
    assert choose_port(port) == port


def test_two_servers_side_by_side_get_different_free_ports():
    first = choose_port(None)
    with socket.create_server(("127.0.0.1", first)):
        assert choose_port(None) != first


def test_without_any_free_port_the_run_fails():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(RunError, match=f"no port from {port} to {port} is free"):
            choose_port(None, range(port, port + 1))
