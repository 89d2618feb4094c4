"""A worker: one process of a load that is split over several. Started by ``WorkerLoad``, never by hand.

Its standard input is the socket to the load (see ``wire.py``); what it prints or raises goes to a file of the
load's. It ends when that socket does, so that none is left behind when benchctl is killed.
"""

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator

import uvloop

from benchctl.load.driver import Load
from benchctl.load.interpreter import steady_interpreter
from benchctl.load.priority import load_priority
from benchctl.load.transport.client import StreamClient
from benchctl.load.transport.exchange import Call
from benchctl.load.workers.wire import (
    TO_WORKER,
    AllCalls,
    AllDone,
    Assignment,
    Begin,
    CallToMake,
    KeptRecord,
    Pulse,
    Ready,
    Stop,
    ToWorker,
    Wire,
)
from benchctl.profile.model import Timeouts
from benchctl.profile.workload import Arrival
from benchctl.records.samples import ClientSample


async def _work() -> None:
    """Take in the assignment and all of its calls, carry it out, say when it is done."""
    sock = socket.socket(fileno=sys.stdin.fileno())
    wire: Wire[ToWorker] = Wire(*await asyncio.open_unix_connection(sock=sock), TO_WORKER)
    assignment = await wire.receive()
    calls: deque[Call] = deque()
    while isinstance(message := await wire.receive(), CallToMake):
        calls.append(message.call)
    if isinstance(assignment, Assignment) and isinstance(message, AllCalls):
        await _carry_out(assignment, calls, wire)
    wire.send(AllDone())
    await wire.close()


async def _carry_out(assignment: Assignment, calls: deque[Call], wire: Wire[ToWorker]) -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_sample(sample: ClientSample) -> None:
        wire.send(Pulse(sample=sample, activity=client.activity()))

    timeouts = Timeouts.model_validate(assignment.timeouts)
    async with StreamClient(assignment.base_url, timeouts) as client:
        load = Load(
            client,
            Arrival.model_validate(assignment.arrival),
            lambda record: wire.send(KeptRecord(record=record)),
            time_scale=assignment.time_scale,
            on_sample=on_sample,
            worker=assignment.worker,
        )
        with steady_interpreter(), load_priority(assignment.priority, assignment.num_processes) as priority:

            async def begin() -> int:
                wire.send(Ready(priority=str(priority)))
                return await started

            driving = asyncio.create_task(load.drive(_taken_from(calls), begin))
            obeying = asyncio.create_task(_obey(wire, started, driving))
            await asyncio.wait({driving})
            obeying.cancel()
            await asyncio.wait({obeying})
    if not driving.cancelled():
        driving.result()


def _taken_from(calls: deque[Call]) -> Iterator[Call]:
    """The calls in their order, none of which is kept after it was made."""
    while calls:
        yield calls.popleft()


async def _obey(wire: Wire[ToWorker], started: asyncio.Future[int], driving: asyncio.Task[None]) -> None:
    """Heed what the load says while it goes on; without it, end at once."""
    while True:
        message = await wire.receive()
        if isinstance(message, Begin) and not started.done():  # the load may have been called off before
            started.set_result(message.start_ns)
        elif isinstance(message, Stop):
            driving.cancel()
        elif message is None:
            os._exit(1)  # nobody is left to whom anything could be told


if __name__ == "__main__":
    uvloop.run(_work())
