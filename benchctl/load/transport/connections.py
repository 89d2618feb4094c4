"""The connections of a load to its server, kept open from one answer to the next where the server allows it.

The next request of a slot is sent on the connection that freed it, which costs one system call. Where a server
closes connections after their answers, announced or not, the next request is sent on a spare connection that was
opened ahead. A connection is not used again after a second without use: servers close idle ones after some seconds.
"""

import asyncio
import errno
import os
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Final, TypeAlias

from benchctl.load.transport.kernel_clock import stamp_arrivals
from benchctl.load.transport.receiver import Connection, Receiver
from benchctl.units import NS_PER_S

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
