"""What a load and the worker processes that carry it out say to each other, and how it goes over a socket.

Each message is four bytes of length, the most significant first, and then MessagePack.

    load     Assignment · CallToMake … · AllCalls ·············· Begin ······························ (Stop)
    worker   ······································· Ready ············ KeptRecord | Pulse … ··· AllDone
"""

import asyncio
import struct
from contextlib import suppress
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from benchctl.load.tally import Activity
from benchctl.load.transport.exchange import Call
from benchctl.profile.model import PriorityOption
from benchctl.records.request import RequestRecord
from benchctl.records.samples import ClientSample

M = TypeVar("M")

_LENGTH: Final = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What all messages share."""


class Assignment(Message, frozen=True, kw_only=True):
    """What a worker is to do. ``arrival`` and ``timeouts`` are those sections of a profile, as plain data."""

    worker: int
    base_url: str
    arrival: dict[str, Any]
    timeouts: dict[str, Any]
    time_scale: float
    priority: PriorityOption
    num_processes: int
    """Of the whole load; each asks for ``priority``."""


class CallToMake(Message, frozen=True, kw_only=True):
    """One of the worker's calls, in the order of the load."""

    call: Call


class AllCalls(Message, frozen=True, kw_only=True):
    """The last call has been sent: lay the first requests ready."""


class Begin(Message, frozen=True, kw_only=True):
    """The schedule starts at ``start_ns`` of the clock that all processes of a host share."""

    start_ns: int


class Stop(Message, frozen=True, kw_only=True):
    """Call the load down."""


class Ready(Message, frozen=True, kw_only=True):
    """The first requests can leave. ``priority`` is what the worker got."""

    priority: str


class KeptRecord(Message, frozen=True, kw_only=True):
    """A request has ended."""

    record: RequestRecord


class Pulse(Message, frozen=True, kw_only=True):
    """How the worker does, ten times per second."""

    sample: ClientSample
    activity: Activity


class AllDone(Message, frozen=True, kw_only=True):
    """The load has ended, and every record of it has been sent."""


ToWorker: TypeAlias = Assignment | CallToMake | AllCalls | Begin | Stop
FromWorker: TypeAlias = Ready | KeptRecord | Pulse | AllDone

TO_WORKER: Final[msgspec.msgpack.Decoder[ToWorker]] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: Final[msgspec.msgpack.Decoder[FromWorker]] = msgspec.msgpack.Decoder(FromWorker)


class Wire(Generic[M]):
    """One end of the connection between a load and a worker, on which messages of type ``M`` come in."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[M]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message) -> None:
        """Send without waiting; no effect where nobody is left to read it."""
        if not self._writer.is_closing():
            content = self._encoder.encode(message)
            self._writer.write(_LENGTH.pack(len(content)) + content)

    async def drain(self) -> None:
        """Wait until what was sent is on its way, but for a little; or until nobody is left to read it."""
        with suppress(ConnectionError):
            await self._writer.drain()

    async def receive(self) -> M | None:
        """The next message; None after the last one that was sent whole."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        """Send what is still to be sent, and close."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
