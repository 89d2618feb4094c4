"""The connections of a load to its server: kept open from one answer to the next where the server allows it.

A slot that becomes free is filled on the connection that freed it, which costs one system call. Whether a server
keeps connections is learnt from the first that has lain idle for a moment and is still open; until then, and where
a server closes them after each answer, the next request goes out on a spare one that was opened ahead. No
connection is used again after a second without use: servers close idle ones after some seconds, and a request that
meets that moment is lost.
"""

import asyncio
import errno
import os
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Final, TypeAlias

from benchctl.load.kernel_clock import stamp_arrivals
from benchctl.load.receiver import Connection, Receiver
from benchctl.units import NS_PER_MS, NS_PER_S

Address: TypeAlias = tuple[socket.AddressFamily, tuple[object, ...]]

_PROOF_NS: Final = 10 * NS_PER_MS
"""A connection that is still open this long after its answer was kept by the server."""
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
        self._kept: dict[int, Connection] = {}
        """By the number of their sockets, the one that was used last at the end."""
        self._spares: dict[int, Connection] = {}
        """Opened ahead and never used."""
        self._to_close: deque[Connection] = deque()
        self._num_spares_wanted = 0
        self._is_tidying = False
        self._does_server_keep: bool | None = None
        self._was_last_closed = False
        self.most_spares = 0

    @property
    def is_reached(self) -> bool:
        """Whether ``open`` can be called: an address has taken a connection."""
        return self._address is not None

    def take(self) -> Connection | None:
        """An open connection that may be used now, or one that is about to open; None where there is none."""
        now_ns = time.monotonic_ns()
        while self._kept:
            number, connection = self._kept.popitem()
            idle_ns = now_ns - connection.idle_since_ns
            if idle_ns > _FRESH_NS:
                self._close_later(connection)
                continue
            if not self._does_server_keep and idle_ns < _PROOF_NS:
                self._kept[number] = connection
                break
            self._does_server_keep = True
            return connection
        return self._spares.popitem()[1] if self._spares else None

    def put_back(self, connection: Connection) -> None:
        """Keep a connection whose answer has ended for the next request; or close it where the server does."""
        is_kept = connection.is_kept and not connection.has_ended
        self._was_last_closed = not is_kept
        connection.num_answers += 1
        connection.idle_since_ns = time.monotonic_ns()
        connection.rest()
        if is_kept and self._does_server_keep is not False:
            self._kept[connection.sock.fileno()] = connection
            return
        self._close_later(connection)
        self.want_spares(1)

    def lose(self, connection: Connection) -> None:
        """Note that the server has closed an idle connection."""
        for idle in (self._kept, self._spares):
            for number, one in idle.items():
                if one is connection:
                    del idle[number]
                    break
        was_kept = connection.num_answers and time.monotonic_ns() - connection.idle_since_ns < _FRESH_NS
        if was_kept and self._does_server_keep is None:
            self._does_server_keep = False
            self.fill()

    def fill(self) -> None:
        """Open as many spare connections as may lie ready, where the server closes each after its answer."""
        if self._does_server_keep is False or self._was_last_closed:
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
            connection.idle_since_ns = time.monotonic_ns()
            self._spares[connection.sock.fileno()] = connection

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
                connection.connected_ns = connection.idle_since_ns = time.monotonic_ns()
                self._receiver.watch(connection)
                self._spares[sock.fileno()] = connection
                return
        raise failure


def _new_socket(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stamp_arrivals(sock)
    return sock
