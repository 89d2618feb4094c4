"""The open sockets of a load: all streams read in batches, and connections kept from one answer to the next."""

import asyncio
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

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


class Connection:
    """One connection to the server, from one answer to the next."""

    __slots__ = (
        "connected_ns", "error", "exchange", "has_ended", "has_failed_to_connect", "idle_since_ns", "is_connecting",
        "is_good", "is_kept", "is_plain", "keep", "num_answers", "num_missing", "reads", "recvmsg_into", "sock",
        "unsent",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.recvmsg_into = sock.recvmsg_into
        self.connected_ns = 0
        self.is_connecting = False
        self.has_failed_to_connect = False
        self.has_ended = False
        """True when the connection is closed, by either side."""
        self.error: OSError | None = None
        self.num_answers = 0
        self.idle_since_ns = 0
        self.unsent = memoryview(b"")
        self.rest()

    def rest(self) -> None:
        """Expect no data: anything that comes now ends the connection."""
        self._expect(None, [])

    def serve(self, exchange: "Exchange") -> None:
        """Store what arrives in ``exchange``."""
        self._expect(exchange, exchange.reads)

    def _expect(self, exchange: "Exchange | None", reads: list[Read]) -> None:
        self.exchange = exchange
        self.reads = reads
        self.keep = reads.append
        self.is_plain = True
        """True while only decoding can tell where the answer ends; false once its head says otherwise."""
        self.is_good = False
        """True when the head says status 200."""
        self.is_kept = False
        """True when the head says that the connection stays open after the answer."""
        self.num_missing: int | None = None
        """Bytes of the body that are still to come by the length in the head; below 0 if more came."""


class HeldBytes:
    """Size of all stored reads that are not yet decoded, shared by those who store and decode them."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


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
        self.held = HeldBytes()
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
        self._epoll.register(descriptor, _OUT if connection.is_connecting else _IN)

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
        """Read, then let more arrive: each time the process wakes has a price."""
        if not self.read_ready() and self.is_stamping and len(self._connections) > _MANY_STREAMS:
            pause_ns = min(_PAUSE_NS, self.due_ns - time.monotonic_ns())
            if pause_ns > 0:
                time.sleep(pause_ns / NS_PER_S)

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
            if connection.is_plain or data[-4:] in _ENDINGS or not data:
                self.held.num_bytes += num_bytes
                num_bytes = 0
                has_ended = self._check_end(connection, data) or has_ended
            if read_ns >= self.due_ns:
                self.on_due()
        self.held.num_bytes += num_bytes
        if self.held.num_bytes > MOST_HELD_BYTES:
            self.on_full()
        return has_ended

    def _check_end(self, connection: Connection, data: bytes) -> bool:
        """Check a read that may end an answer; False when it does not."""
        if connection.exchange is None:
            self.held.num_bytes -= len(data) + OVERHEAD_BYTES
        if not data or connection.exchange is None:
            self._end(connection, None)
            return True
        if connection.num_missing is not None:
            connection.num_missing -= len(data)
        elif connection.is_plain:
            _note_framing(connection, data)
        if _tail(connection.reads) == _END if connection.num_missing is None else connection.num_missing <= 0:
            self._on_end(connection)
        elif connection.num_missing is None and (connection.is_plain or _may_end_in_trailers(data)):
            self._on_possible_end(connection)
        else:
            return False
        return True

    def _is_readable(self, connection: Connection, event: int) -> bool:
        """Continue to connect or to send; True when there is data to read, too."""
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


def _note_framing(connection: Connection, data: bytes) -> None:
    """Note the framing that the head of an answer announces, if it came in one piece.

    Chunks have a last one, a length is counted down, and an answer with neither ends with its connection. A head
    that came in pieces, or after an interim one, is left to decoding.
    """
    head, end, body = data.partition(_BLANK_LINE)
    if not end or head[:5] != b"HTTP/" or head[8:10] == b" 1":
        return
    fields = head.lower()
    connection.is_good = head[8:12] == b" 200"
    length, persistence = _value(fields, b"content-length"), _value(fields, b"connection")
    is_chunked = b"chunked" in _value(fields, b"transfer-encoding")
    # Of an answer that is an error only a part is read, which decoding measures.
    connection.is_plain = bool(length) or not connection.is_good
    if connection.is_good and not is_chunked and length.isdigit() and len(length) < 16:  # else decoding refuses it
        connection.num_missing = int(length) - len(body)
    stays_open = b"close" not in persistence if fields[:8] == b"http/1.1" else b"keep-alive" in persistence
    connection.is_kept = stays_open and (is_chunked or connection.num_missing is not None)


def _value(fields: bytes, name: bytes) -> bytes:
    """The value of a field of a head in lower case; empty without it."""
    return fields.partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0].strip()


def _may_end_in_trailers(data: bytes) -> bool:
    """True when a last chunk with trailers, or one that came in pieces, may end with ``data``.

    An event whose lines end in CR LF ends with one blank line more than that.
    """
    return data[-4:] in _ENDINGS and data[-6:-4] != b"\r\n"


def _tail(reads: list[Read]) -> bytes:
    """The last bytes of ``reads``, as many as ``_END`` has: servers often send the last chunk by itself."""
    tail = b""
    for _, _, data in reversed(reads):
        tail = data[len(tail) - len(_END) :] + tail
        if len(tail) == len(_END):
            break
    return tail


Address: TypeAlias = tuple[socket.AddressFamily, tuple[object, ...]]

_FRESH_NS: Final = NS_PER_S
"""Idle for longer, a connection is closed and not used: the shortest limit of common servers is 5 s."""
_TIDIED_PER_CALL: Final = 8


class Connections:
    """Connections to one host and port, among them up to ``max_spares`` that are opened ahead."""

    def __init__(self, receiver: Receiver, host: str, port: int) -> None:
        self._receiver = receiver
        self._host, self._port = host, port
        self._finding = asyncio.Lock()
        self._address: Address | None = None
        """The first address that accepted a connection; the others are not tried any more."""
        self._idle: list[Connection] = []
        """Idle after an answer, the most recently used last; some may have ended since."""
        self._spares: list[Connection] = []
        """Opened ahead and never used; some may have ended since."""
        self._to_close: deque[Connection] = deque()
        self._num_spares_to_open = 0
        self._is_tidying = False
        self._is_persistent = True
        """True, the default of HTTP/1.1, until the server closes a connection after an answer."""
        self.max_spares = 0

    @property
    def has_address(self) -> bool:
        """True when ``open`` can be called: an address has accepted a connection."""
        return self._address is not None

    def take(self) -> Connection | None:
        """A connection that is open or about to open; None if there is none."""
        now_ns = time.monotonic_ns()
        while self._idle:
            connection = self._idle.pop()
            if connection.has_ended:
                continue
            if self._is_persistent and now_ns - connection.idle_since_ns < _FRESH_NS:
                return connection
            self._close_later(connection)
        while self._spares:
            spare = self._spares.pop()
            if not spare.has_ended:
                return spare
        return None

    def put_back(self, connection: Connection) -> None:
        """Keep a connection for the next request when its answer has ended; close it if the server does not keep
        it.
        """
        is_kept = connection.is_kept and not connection.has_ended and not connection.num_missing
        connection.num_answers += 1
        connection.idle_since_ns = time.monotonic_ns()
        connection.rest()
        if is_kept and self._is_persistent:
            self._idle.append(connection)
            return
        self._note_closing(connection)
        self._close_later(connection)
        self.add_spares(1)

    def note_closed(self, connection: Connection) -> None:
        """Take note of an idle connection that the server has closed without announcement."""
        if time.monotonic_ns() - connection.idle_since_ns < _FRESH_NS:
            self._note_closing(connection)

    def _note_closing(self, connection: Connection) -> None:
        """Expect a server to close all connections if it closes one after its first answer; after more, only this
        one.
        """
        if connection.num_answers == 1 and self._is_persistent:
            self._is_persistent = False
            self.fill()

    def fill(self) -> None:
        """Open all spare connections, if the server closes each connection after its answer."""
        if not self._is_persistent:
            self.add_spares(self.max_spares)

    def add_spares(self, count: int) -> None:
        """Open ``count`` more connections soon, up to ``max_spares``."""
        self._num_spares_to_open = min(self._num_spares_to_open + count, self.max_spares - len(self._spares))
        self._tidy_soon()

    def _close_later(self, connection: Connection) -> None:
        if not connection.has_ended:
            self._to_close.append(connection)
            self._tidy_soon()

    def _tidy_soon(self) -> None:
        if not self._is_tidying:
            self._is_tidying = True
            asyncio.get_running_loop().call_soon(self._tidy)

    def _tidy(self) -> None:
        """Close and open some connections: half a millisecond of work, then streams are read."""
        self._is_tidying = False
        for _ in range(_TIDIED_PER_CALL):
            if self._to_close:
                self._receiver.drop(self._to_close.popleft())
            elif self._num_spares_to_open > 0 and self.has_address:
                self._num_spares_to_open -= 1
                self._open_spare()
            else:
                return
        self._tidy_soon()

    def _open_spare(self) -> None:
        with suppress(OSError):  # the request that needs one reports the error
            connection = self.open()
            self._spares.append(connection)

    def open(self) -> Connection:
        """A new connection, open or about to be. Raises OSError when it cannot be made."""
        if self._address is None:
            raise RuntimeError("no address has been reached yet")
        family, address = self._address
        sock = _new_socket(family)
        connection = Connection(sock)
        number = sock.connect_ex(address)
        if number == errno.EINPROGRESS:
            connection.is_connecting = True
        elif number:
            sock.close()
            raise OSError(number, os.strerror(number))
        else:
            connection.connected_ns = time.monotonic_ns()
        self._receiver.watch(connection)
        return connection

    async def find_address(self) -> None:
        """Find an address that accepts connections, once for all waiting requests; that connection becomes a spare.

        Raises OSError from the last address tried.
        """
        async with self._finding:
            if self._address is None:
                await self._try_addresses()

    async def _try_addresses(self) -> None:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        failure: OSError = OSError(f"{self._host} has no address")
        for family, _, _, _, address in infos:
            sock = _new_socket(family)
            try:
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                self._address = (family, address)
                connection = Connection(sock)
                connection.connected_ns = time.monotonic_ns()
                self._receiver.watch(connection)
                self._spares.append(connection)
                return
        raise failure


def _new_socket(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stamp_arrivals(sock)
    return sock
