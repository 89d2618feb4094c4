"""The interpreter during a load: it collects nothing, and nothing is left that it would have to collect."""

import asyncio
import gc
import sys

import pytest
from support.servers.paced_engine import call, launch, request

from benchctl.load.client import StreamClient
from benchctl.load.process import steady_interpreter
from benchctl.load.schedule import Load
from benchctl.measure.server.server import ServerProcess
from benchctl.profile.arrival import Arrival


@pytest.mark.parametrize("mode", ["good", "truncate", "hang-up", "refuse", "error-event", "noise"])
def test_what_a_load_lets_go_of_is_freed_without_a_search_for_cycles(tmp_path, mode):
    async def left_by(num_requests, client):
        gc.collect()
        calls = (call(request(i, mode=mode)) for i in range(num_requests))
        await Load(client, Arrival(kind="closed-loop", max_concurrency=8), lambda _record: None).drive(calls)
        return gc.collect()

    async def go():
        how = launch(tmp_path)
        with ServerProcess(how) as server:
            async with StreamClient(how.base_url, how.timeouts) as client:
                await server.wait_ready(client.control)
                gc.disable()
                try:
                    await left_by(8, client)  # what is made once is no matter
                    return await left_by(60, client)
                finally:
                    gc.enable()

    assert asyncio.run(go()) < 60


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
