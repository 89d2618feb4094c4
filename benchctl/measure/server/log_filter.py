"""Writes the log of a server without its secrets, while the server runs; a program of its own.

It reads the outputs of the server from a pipe, replaces secrets, and writes the rest to its standard output, the
log: whole lines, within ten milliseconds. It ends when
the last process that has the other end of the pipe ends, so that it also sees the last words of a server that is
killed with benchctl itself.

Its standard input first names the known secrets, one a line as ``<label in hex> <value in hex> <0 or 1>`` (1: only
as a word), up to an empty line: they stand neither in its arguments nor in its environment. Then each line is a
command: ``sync <number>`` passes on what the pipe holds and is answered ``synced <number>``; ``end`` does the same
and ends the program although a process may still have the pipe. Its standard error is a pipe to benchctl with these
answers, with ``lost <errno>`` where the log cannot be written, and at the end with ``<number> <label>`` for the
secrets that it replaced. The arguments are the numbers of the pipe and, where the raw log is kept, of that file.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))  # last, so that nothing there stands for the standard library

from benchctl.untrusted.secrets import KnownValue, RedactedStream, Redactor

_CONTROL, _LOG, _REPORT = 0, 1, 2
_READ_BYTES: Final = 1 << 18
_BUSY_BYTES: Final = 1 << 16
_READS_AT_ONCE: Final = 16
"""For a command, of a pipe that is being filled without end."""
_PAUSE_S: Final = 0.01
"""Between reads of a server that writes little: a read for each line would cost more than the lines."""
_SILENCE_MS: Final = 100
_ORPHAN_S: Final = 60.0
"""Time for the server to end after benchctl was killed: its guardian needs half of that at most."""


class _Filter:
    def __init__(self, pipe: int, raw: int | None) -> None:
        self._pipe, self._raw = pipe, raw
        self._commands = b""
        self._stream = RedactedStream(Redactor(self._known_values()))
        self._poll = select.poll()
        for descriptor in (pipe, _CONTROL):
            self._poll.register(descriptor, select.POLLIN)

    def _known_values(self) -> list[KnownValue]:
        while b"\n\n" not in b"\n" + self._commands and (piece := os.read(_CONTROL, _READ_BYTES)):
            self._commands += piece
        head, _, self._commands = (b"\n" + self._commands).partition(b"\n\n")
        fields = [line.split() for line in head.decode().splitlines() if line]
        return [KnownValue(_text(label), bytes.fromhex(value), word == "1") for label, value, word in fields]

    def run(self) -> None:
        """Pass on the log to its end."""
        deadline = None
        has_ended = self._is_end(b"")  # commands that came with the values
        while not has_ended and (deadline is None or time.monotonic() < deadline):
            events = dict(self._poll.poll(None if deadline is None else _SILENCE_MS))
            if self._pipe in events:
                num_bytes = self._pass_on()
                if not num_bytes:
                    break
                time.sleep(0.0 if num_bytes >= _BUSY_BYTES else _PAUSE_S)
            if _CONTROL in events and deadline is None:
                piece = os.read(_CONTROL, _READ_BYTES)
                if not piece:
                    deadline = time.monotonic() + _ORPHAN_S
                    self._poll.unregister(_CONTROL)
                else:
                    has_ended = self._is_end(piece)
        self._write(self._stream.end())
        for label, count in self._stream.counts.items():
            _report(f"{count} {label}")

    def _is_end(self, piece: bytes) -> bool:
        """Carry out commands; True after the last one."""
        *commands, self._commands = (self._commands + piece).split(b"\n")
        for command in commands:
            for _ in range(_READS_AT_ONCE):
                if not (self._has_data() and self._pass_on()):
                    break
            if command == b"end":
                return True
            _report(command.decode().replace("sync", "synced", 1))
        return False

    def _has_data(self) -> bool:
        return any(descriptor == self._pipe for descriptor, _ in self._poll.poll(0))

    def _pass_on(self) -> int:
        """Pass on what the pipe holds, one read at most; returns the bytes read, 0 at its end."""
        piece = os.read(self._pipe, _READ_BYTES)
        if self._raw is not None and piece:
            _write_all(self._raw, piece)
        self._write(self._stream.feed(piece))
        return len(piece)

    def _write(self, content: bytes) -> None:
        _write_all(_LOG, content)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            _lose(error.errno or 0)


def _lose(number: int) -> NoReturn:
    """End because the log cannot be written: benchctl ends the server then, which would wait for a full pipe."""
    _report(f"lost {number}")
    raise SystemExit(1)


def _report(line: str) -> None:
    with suppress(OSError):  # benchctl was killed
        os.write(_REPORT, f"{line}\n".encode("utf-8", "surrogateescape"))


def _text(hexadecimal: str) -> str:
    return bytes.fromhex(hexadecimal).decode("utf-8", "surrogateescape")


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # each line would interrupt the process that writes it, and its next write be late
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    pipe, *raw = map(int, sys.argv[1:])
    _Filter(pipe, raw[0] if raw else None).run()


if __name__ == "__main__":
    _main()
