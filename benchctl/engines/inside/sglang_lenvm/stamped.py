"""Starts a LenVM server whose step log goes through a pipe, so that each line gets its arrival time.

    python stamped.py PIPE LOG -m sglang.launch_server ...

The fork writes a line for each call of its sampler and flushes it at once, but without a time. Here it
writes into the named pipe PIPE; a child of ours reads it and writes to LOG, for each line, ``{"t_ns": T, "line":
L}``: T is CLOCK_MONOTONIC in nanoseconds, L the line as it came. This process then becomes the server itself. The
child ends when the server has, and only then: an unread pipe would block the server.

Only the standard library is imported.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

_LOOK_MS = 100
"""Interval at which the child checks that the server lives."""
_READ_BYTES = 1 << 16


def main(pipe: str, log: str, command: list[str]) -> None:
    """Make the pipe, leave a child behind that reads it, and become the server."""
    os.mkfifo(pipe)
    # Opened here, so that the server finds a reader however quick it is.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    server = os.getpid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they end the server, which we must outlive
            signal.signal(number, signal.SIG_IGN)
        with open(log, "ab", buffering=0) as stamped:  # noqa: PTH123 - pathlib would double the start-up
            _stamp(reader, stamped.write, server)
        os.unlink(pipe)  # noqa: PTH108
        os._exit(0)
    os.close(reader)
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - no shell is meant


def _stamp(reader: int, write: Callable[[bytes], int | None], server: int) -> None:
    """Copy lines with their times until the server has ended and the pipe is empty."""
    poll, rest = select.poll(), b""
    poll.register(reader, select.POLLIN)
    while True:
        is_ending = os.getppid() != server
        events = poll.poll(0 if is_ending else _LOOK_MS)
        chunk = os.read(reader, _READ_BYTES) if events and events[0][1] & select.POLLIN else b""
        if chunk:
            *lines, rest = (rest + chunk).split(b"\n")
            _write_lines(write, lines)
        elif is_ending:
            if rest:
                _write_lines(write, [rest])
            return
        elif events:  # every writer has closed its end: a poll would return at once
            time.sleep(_LOOK_MS / 1000)


def _write_lines(write: Callable[[bytes], int | None], lines: list[bytes]) -> None:
    """One record for each line; those of one read share its time. A full disk costs lines and not the server."""
    now = time.monotonic_ns()
    for line in lines:
        try:
            write(json.dumps({"t_ns": now, "line": line.decode(errors="replace")}).encode() + b"\n")
        except OSError:
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
