"""The open sockets of a load: all streams read in batches, and connections kept from one answer to the next.

The sockets share one epoll set, which the event loop watches as a single file: however many streams have data, the
loop wakes once and reads them in a row. Each read keeps its own time and the time at which the kernel received its
newest bytes. Nothing is decoded here: a token costs little more than the system call that fetches it.

The receiver recognises the end of a stream by its last bytes and reports it at once: the next request is sent from
within this loop, before the other sockets are read and long before the ended answer is decoded.
"""

import asyncio
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from benchctl.load.clocks import ANCILLARY_BYTES, stamp_arrivals
from benchctl.units import NS_PER_S

if TYPE_CHECKING:
    from benchctl.load.exchange import Exchange

Read: TypeAlias = tuple[int, bytes, bytes]
"""Time of the read on the monotonic clock, the kernel's timestamp of its newest bytes (empty: none), the bytes."""

_READ_BYTES: Final = 16_384
"""Some forty events; the rest is read in the next round, after the other streams."""
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_BLANK_LINE: Final = b"\r\n\r\n"
_ENDINGS: Final = frozenset(_BLANK_LINE[i:] for i in range(len(_BLANK_LINE)))
"""Endings of reads that may complete a chunked body, also where its end came in pieces."""
_END: Final = b"\r\n0\r\n\r\n"
"""The last chunk. An event stream has no line ``0``: all its lines begin with the name of a field."""
MOST_HELD_BYTES: Final = 32 << 20
"""Bytes of undecoded reads beyond which nothing is read before some are decoded."""
OVERHEAD_BYTES: Final = 200
"""Memory of a stored read beside its bytes: a tuple, a number, two headers of objects."""
_PAUSE_NS: Final = 1_000_000
"""Pause after a round of reads in which no answer ended: what arrives meanwhile is read together and costs less,
and the kernel's timestamps say when it came."""
_MANY_STREAMS: Final = 16
"""Below this the pause saves nothing, and would coalesce tokens of one stream that come in quick succession."""
NEVER_NS: Final = 1 << 62
_FRESH_NS: Final = NS_PER_S
"""Idle for longer, a connection is closed and not used: the shortest limit of common servers is 5 s."""


class Connection:
    """One connection to the server, from one answer to the next."""

    __slots__ = (
        "connected_ns", "error", "exchange", "has_ended", "idle_since_ns", "is_kept", "is_stream", "keep",
        "num_answers", "reads", "recvmsg_into", "sock", "unsent",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.recvmsg_into = sock.recvmsg_into
        self.connected_ns = 0
        """0 until it is open."""
        self.has_ended = False
        """True when the connection is closed, by either side."""
        self.error: OSError | None = None
        self.num_answers = 0
        self.idle_since_ns = 0
        self.unsent = memoryview(b"")
        self.serve(None)

    def serve(self, exchange: "Exchange | None") -> None:
        """Store what arrives in ``exchange``; without one, anything that arrives ends the connection."""
        self.exchange = exchange
        self.reads: list[Read] = [] if exchange is None else exchange.reads
        self.keep = self.reads.append
        self.is_stream: bool | None = None
        """True when the head of the answer announces a stream of chunks, whose last one ends it. The end of any
        other answer is left to decoding."""
        self.is_kept = False
        """True when that head lets the connection stay open behind the answer."""


class Receiver:
    """The connections of one event loop, until it is closed.

    ``on_end`` gets each connection whose answer is complete or that has ended, ``on_possible_end`` each whose
    answer may be complete, ``on_open`` each that has opened.
    """

    def __init__(
        self,
        *,
        on_end: Callable[[Connection], None],
        on_possible_end: Callable[[Connection], None],
        on_open: Callable[[Connection], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end, self._on_possible_end, self._on_open = on_end, on_possible_end, on_open
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._buffer = bytearray(_READ_BYTES)
        """Reads go through it: small objects of their own take less memory than parts of large ones."""
        self._keeper = socket.socket()
        """Keeps the kernel's timestamps on while no stream is open: they begin only a while after they are
        requested."""
        self.is_stamping = stamp_arrivals(self._keeper)
        self.num_held_bytes = 0
        """Size of all stored reads that are not yet decoded, kept up to date by those who decode them."""
        self.due_ns = NEVER_NS
        """Time at which ``on_due`` is called even while sockets are read: planned sends are on time whatever
        arrives."""
        self.on_due: Callable[[], None] = lambda: None
        self.on_full: Callable[[], None] = lambda: None
        """Called when stored reads have to be decoded before more are taken."""
        self._loop.add_reader(self._epoll.fileno(), self._read_and_pause)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        for connection in tuple(self._connections.values()):
            self.drop(connection)
        self._epoll.close()
        self._keeper.close()

    def watch(self, connection: Connection) -> None:
        """Read from ``connection``, or wait until it is open."""
        descriptor = connection.sock.fileno()
        self._connections[descriptor] = connection
        self._epoll.register(descriptor, _IN if connection.connected_ns else _OUT)

    def send(self, connection: Connection, request: bytes) -> int:
        """Send ``request`` on an open connection; returns when its first byte was handed over, in ns."""
        sent_ns = time.monotonic_ns()
        try:
            num_sent = connection.sock.send(request)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            # Later: the sender may be in the middle of something.
            self._loop.call_soon(self._end, connection, error)
            return sent_ns
        if num_sent < len(request):
            connection.unsent = memoryview(request)[num_sent:]
            self._epoll.modify(connection.sock.fileno(), _IN | _OUT)
        return sent_ns

    def drop(self, connection: Connection) -> None:
        """Close a connection; no effect on one that is closed."""
        connection.has_ended = True
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
        connection.sock.close()

    def _read_and_pause(self) -> None:
        """Read, let more arrive and read that: each time the process wakes has a price."""
        if not self.read_ready() and self.is_stamping and len(self._connections) > _MANY_STREAMS:
            pause_ns = min(_PAUSE_NS, self.due_ns - time.monotonic_ns())
            if pause_ns > 0:
                time.sleep(pause_ns / NS_PER_S)
                self.read_ready()

    def read_ready(self) -> bool:
        """Read once from each connection that has data; True when an answer may have ended."""
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
            if not connection.is_stream or data[-4:] in _ENDINGS or not data:
                self.num_held_bytes += num_bytes
                num_bytes = 0
                has_ended = self._check_end(connection, data) or has_ended
            if read_ns >= self.due_ns:
                self.on_due()
        self.num_held_bytes += num_bytes
        if self.num_held_bytes > MOST_HELD_BYTES:
            self.on_full()
        return has_ended

    def _check_end(self, connection: Connection, data: bytes) -> bool:
        """Check a read that may end an answer; False when it does not."""
        if connection.exchange is None:
            self.num_held_bytes -= len(data) + OVERHEAD_BYTES
        if not data or connection.exchange is None:
            self._end(connection, None)
            return True
        if connection.is_stream is None:
            head, end, _ = data.partition(_BLANK_LINE)
            fields = head.lower()
            is_chunked = b"\r\ntransfer-encoding: chunked" in fields
            connection.is_stream = bool(end) and fields[:12] == b"http/1.1 200" and is_chunked
            connection.is_kept = b"\r\nconnection: close" not in fields
        last = b"".join([piece for _, _, piece in connection.reads[-len(_END) :]])  # often the last chunk by itself
        if connection.is_stream and last.endswith(_END):
            self._on_end(connection)
        elif not connection.is_stream or _may_end_in_trailers(data):
            self._on_possible_end(connection)
        else:
            return False
        return True

    def _is_readable(self, connection: Connection, event: int) -> bool:
        """Continue to connect or to send; True when there is data to read, too."""
        if not connection.connected_ns:
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
            self._end(connection, OSError(number, os.strerror(number)))
            return
        connection.connected_ns = time.monotonic_ns()
        self._epoll.modify(connection.sock.fileno(), _IN)
        self._on_open(connection)

    def _end(self, connection: Connection, error: OSError | None) -> None:
        if not connection.has_ended:
            connection.error = error
            self.drop(connection)
            self._on_end(connection)


def _may_end_in_trailers(data: bytes) -> bool:
    """True when a last chunk with trailers, or one that came in pieces, may end with ``data``.

    An event whose lines end in CR LF ends with one blank line more than that.
    """
    return data[-4:] in _ENDINGS and data[-6:-4] != b"\r\n"


class Connections:
    """The connections of a load to its server, kept open from one answer to the next where the server allows it.

    The next request of a slot is sent on the connection that freed it, which costs one system call.
    """

    def __init__(self, receiver: Receiver, host: str, port: int, timeout_s: float) -> None:
        self._receiver = receiver
        self._server, self._timeout_s = (host, port), timeout_s
        self._finding: asyncio.Task[None] | None = None
        """The search for an address, which all requests wait for that come before it has ended."""
        self._family = socket.AF_INET
        self._address: Any = None
        """The first address that accepted a connection; the others are not tried any more."""
        self._idle: list[Connection] = []
        """Idle after an answer, the most recently used last; some may have ended since."""
        self._is_persistent = True
        """True, the default of HTTP/1.1, until the server closes a connection after an answer unannounced."""

    @property
    def has_address(self) -> bool:
        """True when ``open`` can be called: an address has accepted a connection."""
        return self._address is not None

    def take(self) -> Connection | None:
        """An idle connection; None if there is none."""
        now_ns = time.monotonic_ns()
        while self._idle:
            connection = self._idle.pop()
            if connection.has_ended:
                continue
            if self._is_persistent and now_ns - connection.idle_since_ns < _FRESH_NS:
                return connection
            self._receiver.drop(connection)
        return None

    def put_back(self, connection: Connection) -> None:
        """Keep a connection for the next request when its answer has ended."""
        connection.num_answers += 1
        connection.idle_since_ns = time.monotonic_ns()
        connection.serve(None)
        self._idle.append(connection)

    def note_closed(self, connection: Connection) -> None:
        """Take note of an idle connection that the server has closed without announcement: if it does so after the
        first answer, expect it to close all.
        """
        if connection.num_answers == 1 and time.monotonic_ns() - connection.idle_since_ns < _FRESH_NS:
            self._is_persistent = False

    def open(self) -> Connection:
        """A new connection, open or about to be. Raises OSError when it cannot be made."""
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setblocking(False)
        number = sock.connect_ex(self._address)
        if number not in {0, errno.EINPROGRESS}:
            sock.close()
            raise OSError(number, os.strerror(number))
        return self._watched(sock, is_open=not number)

    async def find_address(self) -> None:
        """Find an address that accepts connections, once for all waiting requests; that connection is idle then.

        The search goes on when a request that waits for it ends. Raises OSError from the last address tried.
        """
        if self.has_address:
            return
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._find())
        await asyncio.shield(self._finding)

    async def _find(self) -> None:
        sock = await asyncio.to_thread(socket.create_connection, self._server, self._timeout_s)
        self._family, self._address = sock.family, sock.getpeername()
        self._idle.append(self._watched(sock, is_open=True))

    def close(self) -> None:
        """Give up the search for an address."""
        if self._finding is not None:
            self._finding.cancel()

    def _watched(self, sock: socket.socket, *, is_open: bool) -> Connection:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stamp_arrivals(sock)
        connection = Connection(sock)
        if is_open:
            connection.connected_ns = connection.idle_since_ns = time.monotonic_ns()
        self._receiver.watch(connection)
        return connection
