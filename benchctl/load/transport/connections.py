"""The connections of a load to its server: kept open from one answer to the next where the server allows it.

A slot that becomes free is filled on the connection that freed it, which costs one system call. Where a server
closes connections after their answers, whether it says so or not, the next request goes out on a spare one that was
opened ahead. No connection is used again after a second without use: servers close idle ones after some seconds.
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
_TIDIED_AT_ONCE: Final = 8


class Connections:
    """Connections to one host and port. ``most_spares`` is how many may lie ready that nobody has asked for yet."""

    def __init__(self, receiver: Receiver, host: str, port: int) -> None:
        self._receiver = receiver
        self._host, self._port = host, port
        self._reaching = asyncio.Lock()
        self._address: Address | None = None
        """The one that has taken a connection: the others are not tried any more."""
        self._kept: list[Connection] = []
        """After an answer, the one that was used last at the end; some may have ended since."""
        self._spares: list[Connection] = []
        """Opened ahead and never used; some may have ended since."""
        self._to_close: deque[Connection] = deque()
        self._num_spares_wanted = 0
        self._is_tidying = False
        self._does_server_keep = True
        """As HTTP/1.1 has it, until the server does otherwise."""
        self.most_spares = 0

    @property
    def is_reached(self) -> bool:
        """Whether ``open`` can be called: an address has taken a connection."""
        return self._address is not None

    def take(self) -> Connection | None:
        """An open connection that may be used now, or one that is about to open; None where there is none."""
        now_ns = time.monotonic_ns()
        while self._kept:
            connection = self._kept.pop()
            if connection.has_ended:
                continue
            if self._does_server_keep and now_ns - connection.idle_since_ns < _FRESH_NS:
                return connection
            self._close_later(connection)
        while self._spares:
            spare = self._spares.pop()
            if not spare.has_ended:
                return spare
        return None

    def put_back(self, connection: Connection) -> None:
        """Keep a connection whose answer has ended for the next request; or close it where the server does."""
        is_kept = connection.is_kept and not connection.has_ended
        connection.num_answers += 1
        connection.idle_since_ns = time.monotonic_ns()
        connection.rest()
        if is_kept and self._does_server_keep:
            self._kept.append(connection)
            return
        self._learn(connection)
        self._close_later(connection)
        self.want_spares(1)

    def lose(self, connection: Connection) -> None:
        """Learn from an idle connection that the server has closed, without having said that it would."""
        if time.monotonic_ns() - connection.idle_since_ns < _FRESH_NS:
            self._learn(connection)

    def _learn(self, connection: Connection) -> None:
        """A server that closes a connection after its first answer closes all; after more, it closes this one."""
        if connection.num_answers == 1 and self._does_server_keep:
            self._does_server_keep = False
            self.fill()

    def fill(self) -> None:
        """Open as many spare connections as may lie ready, where the server closes each after its answer."""
        if not self._does_server_keep:
            self.want_spares(self.most_spares)

    def want_spares(self, count: int) -> None:
        """Open ``count`` connections more, in a moment, up to ``most_spares``."""
        self._num_spares_wanted = min(self._num_spares_wanted + count, self.most_spares - len(self._spares))
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
        """Close and open some connections: half a millisecond of work, then the streams have their turn."""
        self._is_tidying = False
        for _ in range(_TIDIED_AT_ONCE):
            if self._to_close:
                self._receiver.drop(self._to_close.popleft())
            elif self._num_spares_wanted > 0 and self.is_reached:
                self._num_spares_wanted -= 1
                self._open_spare()
            else:
                return
        self._tidy_soon()

    def _open_spare(self) -> None:
        with suppress(OSError):  # who needs one will learn why there is none
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

    async def reach(self) -> None:
        """Find an address that takes connections, once for all who wait; the one that it took lies ready.

        Raises OSError from the last address tried.
        """
        async with self._reaching:
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
