"""Takes in all open streams of one process, in batches.

The sockets share one epoll set, which the event loop watches as a single file: however many streams have something,
the loop is woken once and all are read in a row, each with the time at which the kernel received its newest bytes
and the time of the read. Nothing is decoded here: a token costs little more than the system call that fetches it.

The end of an answer is seen here as well, by its last bytes, and told at once: the next request goes out from
within this loop, before the other sockets are read and long before the answer that ended is decoded.
"""

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from benchctl.load.transport.kernel_clock import ANCILLARY_BYTES, stamp_arrivals
from benchctl.units import NS_PER_S

if TYPE_CHECKING:
    from benchctl.load.transport.exchange import Exchange

Read: TypeAlias = tuple[int, bytes, bytes]
"""Time of the read on the monotonic clock, the kernel's stamp of its newest bytes (empty: none), the bytes."""

_READ_BYTES: Final = 16_384
"""Some forty events; what is left is read in the next round, after the other streams had their turn."""
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_BLANK_LINE: Final = b"\r\n\r\n"
_ENDINGS: Final = frozenset(_BLANK_LINE[i:] for i in range(len(_BLANK_LINE)))
"""What a read that completes a chunked body ends with, or is where its end came in pieces."""
_END: Final = b"\r\n0\r\n\r\n"
"""A line that is 0 cannot stand in an event stream: all its lines begin with the name of a field."""
OVERHEAD_BYTES: Final = 200
"""What keeping a read costs beside its bytes: a tuple, a number, two headers of objects."""
_PAUSE_NS: Final = 1_000_000
"""After a round of reads in which no answer ended, nothing is read for so long: what arrives meanwhile is read in
one go and costs less, and the kernel's stamps say when it came."""
_MANY_STREAMS: Final = 16
"""Below, there is nothing to save, and tokens of one stream that come in quick succession are read one by one."""
NEVER_NS: Final = 1 << 62


class Connection:
    """One connection to the server, from one answer to the next."""

    __slots__ = (
        "connected_ns", "error", "exchange", "has_ended", "has_failed_to_connect", "idle_since_ns", "is_connecting",
        "is_good", "is_kept", "is_plain", "keep", "num_answers", "reads", "recvmsg_into", "sock", "unsent",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.recvmsg_into = sock.recvmsg_into
        self.connected_ns = 0
        self.is_connecting = False
        self.has_failed_to_connect = False
        self.has_ended = False
        """Whether the connection is closed, by either side."""
        self.error: OSError | None = None
        self.num_answers = 0
        self.idle_since_ns = 0
        self.unsent = memoryview(b"")
        self.rest()

    def rest(self) -> None:
        """Expect nothing: whatever comes now ends the connection."""
        self._expect(None, [])

    def serve(self, exchange: "Exchange") -> None:
        """Keep what comes for ``exchange``."""
        self._expect(exchange, exchange.reads)

    def _expect(self, exchange: "Exchange | None", reads: list[Read]) -> None:
        self.exchange = exchange
        self.reads = reads
        self.keep = reads.append
        self.is_plain = True
        """Whether only who decodes the answer can tell its end; false once its head says otherwise."""
        self.is_good = False
        """Whether the head says status 200."""
        self.is_kept = False
        """Whether the head says that the connection stays open after the answer."""


class HeldBytes:
    """What the reads come to that are kept and not yet decoded: a count that many hands keep."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


class Receiver:
    """The connections of one event loop, until it is closed.

    ``on_end`` hears of a connection whose answer is whole or that has ended, ``on_look`` of one on which something
    came after which the answer may be whole, ``on_open`` of one that is open now.
    """

    def __init__(
        self,
        *,
        on_end: Callable[[Connection], None],
        on_look: Callable[[Connection], None],
        on_open: Callable[[Connection], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end, self._on_look, self._on_open = on_end, on_look, on_open
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._buffer = bytearray(_READ_BYTES)
        """Reads go through it: small bytes of their own weigh less than what is left of large ones."""
        self._keeper = socket.socket()
        """Keeps the kernel stamping while no stream is open: it begins to only some time after it is asked."""
        self.is_stamping = stamp_arrivals(self._keeper)
        self.held = HeldBytes()
        self.due_ns = NEVER_NS
        """When ``on_due`` is called in the midst of reading: a plan of sends is kept whatever comes in."""
        self.on_due: Callable[[], None] = lambda: None
        self._loop.add_reader(self._epoll.fileno(), self._read_and_pause)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        for connection in tuple(self._connections.values()):
            self.drop(connection)
        self._epoll.close()
        self._keeper.close()

    def watch(self, connection: Connection) -> None:
        """Take in what comes on ``connection``, or learn when it is open."""
        descriptor = connection.sock.fileno()
        self._connections[descriptor] = connection
        self._epoll.register(descriptor, _OUT if connection.is_connecting else _IN)

    def send(self, connection: Connection, request: bytes) -> int:
        """Send ``request`` on an open connection; returns when its first byte was handed over, in ns."""
        sent_ns = time.monotonic_ns()
        try:
            num_sent = connection.sock.send(request)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            # Told later: who sends may be in the midst of something.
            self._loop.call_soon(self._end, connection, error)
            return sent_ns
        if num_sent < len(request):
            connection.unsent = memoryview(request)[num_sent:]
            self._epoll.modify(connection.sock.fileno(), _IN | _OUT)
        return sent_ns

    def drop(self, connection: Connection) -> None:
        """Close a connection, whatever has come; no effect on one that is closed."""
        connection.has_ended = True
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
        connection.sock.close()

    def _read_and_pause(self) -> None:
        """Read, and let more arrive before the next look: each look wakes the process, and has its price."""
        if not self.read_ready() and self.is_stamping and len(self._connections) > _MANY_STREAMS:
            pause_ns = min(_PAUSE_NS, self.due_ns - time.monotonic_ns())
            if pause_ns > 0:
                time.sleep(pause_ns / NS_PER_S)

    def read_ready(self) -> bool:
        """Read once from each connection that has something; True when an answer may have ended."""
        connections, now_ns, num_bytes, has_ended = self._connections, time.monotonic_ns, 0, False
        buffers, view = (self._buffer,), memoryview(self._buffer)
        for descriptor, event in self._epoll.poll(0):
            connection = connections.get(descriptor)
            if connection is None or (event != _IN and not self._is_readable(connection, event)):
                continue
            try:
                length, ancillary, _, _ = connection.recvmsg_into(buffers, ANCILLARY_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                self._end(connection, error)
                continue
            read_ns, data = now_ns(), bytes(view[:length])
            connection.keep((read_ns, ancillary[0][2] if ancillary else b"", data))
            num_bytes += len(data) + OVERHEAD_BYTES
            if connection.is_plain or data[-4:] in _ENDINGS or not data:
                self.held.num_bytes += num_bytes
                num_bytes = 0
                has_ended = self._look(connection, data) or has_ended
            if read_ns >= self.due_ns:
                self.on_due()
        self.held.num_bytes += num_bytes
        return has_ended

    def _look(self, connection: Connection, data: bytes) -> bool:
        """Look closer at a read that an answer may end with; False when it does not."""
        if connection.exchange is None:
            self.held.num_bytes -= len(data) + OVERHEAD_BYTES
        if not data or connection.exchange is None:
            self._end(connection, None)
            return True
        if connection.is_plain:
            _take_head(connection, data)
        if _tail(connection.reads) == _END:
            self._on_end(connection)
        elif connection.is_plain or _may_end_in_trailers(data):
            self._on_look(connection)
        else:
            return False
        return True

    def _is_readable(self, connection: Connection, event: int) -> bool:
        """Go on connecting or sending; True when there is something to read, too."""
        if connection.is_connecting:
            self._finish_connecting(connection)
            return False
        if not event & _OUT or not connection.unsent:
            return True
        try:
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(connection, error)
            return False
        if not connection.unsent:
            self._epoll.modify(connection.sock.fileno(), _IN)
        return bool(event & ~_OUT)

    def _finish_connecting(self, connection: Connection) -> None:
        number = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            connection.has_failed_to_connect = True
            self._end(connection, OSError(number, os.strerror(number)))
            return
        connection.is_connecting = False
        connection.connected_ns = time.monotonic_ns()
        self._epoll.modify(connection.sock.fileno(), _IN)
        self._on_open(connection)

    def _end(self, connection: Connection, error: OSError | None) -> None:
        if not connection.has_ended:
            connection.error = error
            self.drop(connection)
            self._on_end(connection)


def _take_head(connection: Connection, data: bytes) -> None:
    """Note what the head of an answer says of its framing, where it came whole.

    Chunks have a last one, and an answer without a length ends with its connection. A head that came in pieces, or
    after an interim one, is left to who decodes the answer.
    """
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end or head[:5] != b"HTTP/" or head[8:10] == b" 1":
        return
    fields = head.lower()
    connection.is_plain = b"content-length:" in fields
    connection.is_good = head[8:12] == b" 200"
    connection.is_kept = (
        fields[:8] == b"http/1.1" and b"transfer-encoding: chunked" in fields and b"connection: close" not in fields
    )


def _may_end_in_trailers(data: bytes) -> bool:
    """Whether a last chunk may end with this, which holds headers of its own or came in pieces.

    An event whose lines end in CR LF ends with one blank line more than that.
    """
    return data[-4:] in _ENDINGS and data[-6:-4] != b"\r\n"


def _tail(reads: list[Read]) -> bytes:
    """The last bytes that came, as many as ``_END`` has: servers often send the last chunk by itself."""
    tail = b""
    for _, _, data in reversed(reads):
        tail = data[len(tail) - len(_END) :] + tail
        if len(tail) == len(_END):
            break
    return tail
