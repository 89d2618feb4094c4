"""Messages between a load and its worker processes, and their encoding on a socket.

Each message is its length in four bytes, the most significant first, and then MessagePack.

    load     Assignment · CallToMake … · AllCalls ·············· Begin ······························ (Stop)
    worker   ······································· Ready ············ KeptRecord | Pulse … ··· AllDone
"""

import asyncio
import struct
from contextlib import suppress
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from benchctl.load.tally import Activity
from benchctl.profile.sections import PriorityOption
from benchctl.records.record import Call, RequestRecord
from benchctl.records.schema import ClientSample

M = TypeVar("M")

_LENGTH: Final = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Assignment(Message, frozen=True, kw_only=True):
    """The task of a worker. ``arrival`` and ``timeouts`` are those sections of a profile, as plain data."""

    worker: int
    base_url: str
    arrival: dict[str, Any]
    timeouts: dict[str, Any]
    time_scale: float
    priority: PriorityOption
    num_processes: int
    """Processes of the whole load, each of which requests ``priority``."""


class CallToMake(Message, frozen=True, kw_only=True):
    """One of the worker's calls, in the order of the load."""

    call: Call


class AllCalls(Message, frozen=True, kw_only=True):
    """The last call has been sent: prepare the first requests."""


class Begin(Message, frozen=True, kw_only=True):
    """The schedule starts at ``start_ns`` of the clock that all processes of a host share."""

    start_ns: int


class Stop(Message, frozen=True, kw_only=True):
    """Cancel the load."""


class Ready(Message, frozen=True, kw_only=True):
    """The first requests are prepared. ``priority`` is what the worker was granted."""

    priority: str


class KeptRecord(Message, frozen=True, kw_only=True):
    """A request has ended."""

    record: RequestRecord


class Pulse(Message, frozen=True, kw_only=True):
    """A sample of the worker, ten times per second."""

    sample: ClientSample
    activity: Activity


class AllDone(Message, frozen=True, kw_only=True):
    """The load has ended, and every record of it has been sent."""


ToWorker: TypeAlias = Assignment | CallToMake | AllCalls | Begin | Stop
FromWorker: TypeAlias = Ready | KeptRecord | Pulse | AllDone

TO_WORKER: Final[msgspec.msgpack.Decoder[ToWorker]] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: Final[msgspec.msgpack.Decoder[FromWorker]] = msgspec.msgpack.Decoder(FromWorker)


class Wire(Generic[M]):
    """One end of the connection between a load and a worker, which receives messages of type ``M``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[M]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message) -> None:
        """Send without waiting; no effect when the other end has gone."""
        if not self._writer.is_closing():
            content = self._encoder.encode(message)
            self._writer.write(_LENGTH.pack(len(content)) + content)

    async def drain(self) -> None:
        """Wait until most of what was sent has been taken, or the other end has gone."""
        with suppress(ConnectionError):
            await self._writer.drain()

    async def receive(self) -> M | None:
        """The next message; None after the last complete one."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
