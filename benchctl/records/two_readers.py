"""A second process that reads part of many files for this one: most of reading is decoding on one core."""

import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final, TypeVar

Item = TypeVar("Item", bound=Hashable)
Value = TypeVar("Value")
LONG_BYTES: Final = 64 << 20
"""Files that take several times as long to read as a process takes to start."""
_SECOND_PROCESS: Final = f"import gc; gc.disable(); from {__name__} import answer_reader; answer_reader()"
"""Without the garbage collector: none of the records is part of a cycle, and to search them takes time."""


@contextmanager
def two_readers(
    read: Callable[[Item], Value], items: Sequence[Item], num_bytes: int
) -> Iterator[Callable[[Item], Value]]:
    """Yields ``read`` for these items, of so many bytes, which are read in this order.

    Where they are long, a second process begins with the last of them meanwhile. What it does not read, for
    whatever reason, this process reads. It ends with the context.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    second = _second_process() if num_bytes >= LONG_BYTES and num_cores > 1 else None
    if second is None:
        yield read
        return
    process, ours = second
    with process, ours, ThreadPoolExecutor(1) as thread:

        def ask(item: Item) -> Any:
            ours.send((read, item))
            return ours.recv()

        answers: dict[Item, Future[Value]] = {item: thread.submit(ask, item) for item in reversed(items)}

        def read_or_take(item: Item) -> Value:
            answer = answers.pop(item)  # the values of long files are the largest there are: none is kept here
            is_ours = answer.cancel() or answer.exception() is not None
            return read(item) if is_ours else answer.result()

        try:
            yield read_or_take
        finally:
            process.kill()


def _second_process() -> tuple["subprocess.Popen[bytes]", Connection] | None:
    """A process that reads files, and the connection to it; None where no process can be started."""
    ours, theirs = Pipe()
    with theirs:
        try:
            process = subprocess.Popen(
                (sys.executable, "-P", "-c", _SECOND_PROCESS),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it is told of interrupts as well
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        except OSError:
            ours.close()
            return None
    return process, ours


def answer_reader() -> None:
    """The second process: reads what it is asked for until nobody asks any more, or something cannot be read."""
    with Connection(sys.stdin.fileno()) as connection, suppress(EOFError, OSError):
        while True:
            read, item = connection.recv()
            connection.send(read(item))
