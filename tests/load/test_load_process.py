"""The interpreter during a load: it collects nothing, and nothing is left that it would have to collect."""

import asyncio
import gc
import resource
import sys

import pytest
from support.servers.paced_engine import call, request, running

from benchctl.load.client import StreamClient
from benchctl.load.process import allow_many_open_files, steady_interpreter
from benchctl.load.schedule import Load
from benchctl.profile.arrival import Arrival


def test_what_a_load_lets_go_of_is_freed_without_a_search_for_cycles(tmp_path):
    async def left_by(client, mode, num_requests):
        gc.collect()
        calls = (call(request(i, mode=mode)) for i in range(num_requests))
        await Load(client, Arrival(kind="closed-loop", max_concurrency=8), lambda _record: None).drive(calls)
        return gc.collect()

    async def go(how):
        async with StreamClient(how.base_url, how.timeouts) as client:
            gc.disable()
            try:
                for mode in ("good", "truncate", "hang-up", "refuse", "error-event", "noise"):
                    await left_by(client, mode, 8)  # what is made once is no matter
                    assert await left_by(client, mode, 60) < 60, mode
            finally:
                gc.enable()

    with running(tmp_path) as how:
        asyncio.run(go(how))


def test_as_many_connections_are_allowed_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        allow_many_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_is_collected_inside_and_all_is_as_before_outside():
    interval_s, num_collections = sys.getswitchinterval(), []

    def note(phase, _info):
        num_collections.append(phase)

    with steady_interpreter():
        gc.callbacks.append(note)
        for _ in range(20_000):
            cycle = []
            cycle.append(cycle)
        assert (num_collections, gc.isenabled()) == ([], False)
        assert sys.getswitchinterval() < interval_s
        gc.callbacks.remove(note)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    assert sys.getswitchinterval() == pytest.approx(interval_s)
    assert gc.collect() < 1000, "the cycles were left"
