"""Takes in all open streams of one process, in batches.

The sockets share one epoll set, which the event loop watches as a single file: however many streams have something,
the loop is woken once and all are read in a row, each with the time at which the kernel received its newest bytes
and the time of the read. Nothing is understood here and no task is woken until a stream has ended. This is why a
token costs little more than the system call that fetches it.
"""

import asyncio
import select
import socket
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from benchctl.load.kernel_clock import ANCILLARY_BYTES, stamp_arrivals

Read: TypeAlias = tuple[int, bytes, bytes]
"""Time of the read on the monotonic clock, the kernel's stamp of its newest bytes (empty: none), the bytes."""

_READ_BYTES: Final = 16_384
"""Some forty events; what is left is read in the next round, after the other streams had their turn."""
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_LAST_CHUNK: Final = b"0\r\n\r\n"
_ENDINGS: Final = frozenset(_LAST_CHUNK[i:] for i in range(len(_LAST_CHUNK)))
"""What a read that completes the last chunk ends with, or is where that came in pieces."""
_END: Final = b"\r\n" + _LAST_CHUNK
"""A line that is 0 cannot stand in an event stream: all its lines begin with the name of a field."""
OVERHEAD_BYTES: Final = 200
"""What keeping a read costs beside its bytes: a tuple, a number, two headers of objects."""


class Line:
    """One connection while an answer comes in. ``on_pause`` is called when its task should look."""

    __slots__ = ("error", "is_ended", "is_plain", "keep", "on_pause", "reads", "recvmsg", "sock", "unsent")

    def __init__(self, sock: socket.socket, reads: list[Read], on_pause: Callable[[], None]) -> None:
        self.sock = sock
        self.reads = reads
        self.keep = reads.append
        self.recvmsg = sock.recvmsg
        self.on_pause = on_pause
        self.unsent = memoryview(b"")
        self.is_plain = True
        """Whether only who understands the answer can tell its end; false once its head says otherwise."""
        self.is_ended = False
        """No more will come: the last chunk has, or the connection has ended."""
        self.error: OSError | None = None


class Held:
    """What the reads come to that are kept and not yet understood, in bytes: a count that many hands keep."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


class Receiver:
    """The open streams of one event loop. Use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._lines: dict[int, Line] = {}
        self._keeper = socket.socket()
        """Keeps the kernel stamping while no stream is open: it begins to only some time after it is asked."""
        self.is_stamping = stamp_arrivals(self._keeper)
        self.held = Held()
        self._loop.add_reader(self._epoll.fileno(), self.read_ready)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        for line in tuple(self._lines.values()):
            self.drop(line)
        self._epoll.close()
        self._keeper.close()

    def launch(self, line: Line, request: bytes) -> int:
        """Send ``request`` and take in what comes back; returns when its first byte was handed over, in ns."""
        descriptor = line.sock.fileno()
        self._lines[descriptor] = line
        self._epoll.register(descriptor, _IN)
        sent_ns = time.monotonic_ns()
        try:
            num_sent = line.sock.send(request)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            self._end(line, error)
            return sent_ns
        if num_sent < len(request):
            line.unsent = memoryview(request)[num_sent:]
            self._epoll.modify(descriptor, _IN | _OUT)
        return sent_ns

    def drop(self, line: Line) -> None:
        """Close a line, whatever has come; no effect on one that is closed."""
        descriptor = line.sock.fileno()
        if self._lines.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
        line.sock.close()

    def read_ready(self) -> None:
        """Read once from each line that has something."""
        lines, now_ns, num_bytes = self._lines, time.monotonic_ns, 0
        for descriptor, event in self._epoll.poll(0):
            line = lines.get(descriptor)
            if line is None or (event != _IN and event & _OUT and not self._sent_on(line, event)):
                continue
            try:
                data, ancillary, _, _ = line.recvmsg(_READ_BYTES, ANCILLARY_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                self._end(line, error)
                continue
            line.keep((now_ns(), ancillary[0][2] if ancillary else b"", data))
            num_bytes += len(data) + OVERHEAD_BYTES
            if line.is_plain or data[-5:] in _ENDINGS or not data:
                self._look(line, data)
        self.held.num_bytes += num_bytes

    def _look(self, line: Line, data: bytes) -> None:
        """A read after which the answer may be whole."""
        if not data or _tail(line.reads) == _END:
            self._end(line, None)
        elif data[-5:] in _ENDINGS:
            line.on_pause()
        elif line.is_plain:
            head, end, _ = data.partition(b"\r\n\r\n")
            # Chunks have a last one, and an answer without a length ends with its connection. A head that came in
            # pieces, or after an interim one, is left to who understands it.
            is_head = bool(end) and head[:5] == b"HTTP/" and head[8:10] != b" 1"
            line.is_plain = not is_head or b"content-length:" in head.lower()
            if line.is_plain:
                line.on_pause()

    def _sent_on(self, line: Line, event: int) -> bool:
        """Send more of a request that the socket did not take whole; True when there is something to read, too."""
        try:
            line.unsent = line.unsent[line.sock.send(line.unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(line, error)
            return False
        if not line.unsent:
            self._epoll.modify(line.sock.fileno(), _IN)
        return bool(event & ~_OUT)

    def _end(self, line: Line, error: OSError | None) -> None:
        line.error = error
        line.is_ended = True
        self.drop(line)
        line.on_pause()


def _tail(reads: list[Read]) -> bytes:
    """The last bytes that came, as many as ``_END`` has: servers often send the last chunk by itself."""
    tail = b""
    for _, _, data in reversed(reads):
        tail = data[len(tail) - len(_END) :] + tail
        if len(tail) == len(_END):
            break
    return tail
