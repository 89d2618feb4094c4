"""A worker: one process of a load that is split over several. ``WorkerLoad`` starts it.

Its standard input is the socket to the load (see ``wire.py``); its output goes to a file of the load. It ends when
the socket closes, so that no worker is left behind when benchctl is killed.
"""

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator

import uvloop

from benchctl.load.client import StreamClient
from benchctl.load.process import load_priority, steady_interpreter
from benchctl.load.schedule import Load
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
from benchctl.profile.model import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.records.record import Call
from benchctl.records.schema import ClientSample


async def _work() -> None:
    """Receive the assignment and all of its calls, carry it out, report its end."""
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
            following = asyncio.create_task(_follow_commands(wire, started, driving))
            await asyncio.wait({driving})
            following.cancel()
            await asyncio.wait({following})
    if not driving.cancelled():
        driving.result()


def _taken_from(calls: deque[Call]) -> Iterator[Call]:
    while calls:
        yield calls.popleft()


async def _follow_commands(wire: Wire[ToWorker], started: asyncio.Future[int], driving: asyncio.Task[None]) -> None:
    """Follow the commands of the load; end at once when the load has gone."""
    while True:
        message = await wire.receive()
        if isinstance(message, Begin) and not started.done():  # the load may have been cancelled before
            started.set_result(message.start_ns)
        elif isinstance(message, Stop):
            driving.cancel()
        elif message is None:
            os._exit(1)  # the load has gone, and nothing can be reported


if __name__ == "__main__":
    uvloop.run(_work())
