"""A second process that works for this one meanwhile: reading many files and drawing take one core each."""

import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final, TypeAlias, TypeVar

Item = TypeVar("Item", bound=Hashable)
Value = TypeVar("Value")
Call: TypeAlias = Callable[..., Future[Any]]
LONG_BYTES: Final = 64 << 20
"""Files that take several times as long to read as a process takes to start."""
_SECOND_PROCESS: Final = f"import gc; gc.disable(); from {__name__} import answer_calls; answer_calls()"
"""Without the garbage collector: none of the records is part of a cycle, and to search them takes time."""


@contextmanager
def second_process() -> Iterator[Call | None]:
    """Yields what calls a function of a module there, one call after another; None with one core, or without one.

    The future of a call that it does not answer, for whatever reason, has an error. It ends with the context.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    started = _started() if num_cores > 1 else None
    if started is None:
        yield None
        return
    process, ours = started

    def ask(*call: Any) -> Any:
        ours.send(call)
        return ours.recv()

    with process, ours, ThreadPoolExecutor(1) as thread:
        try:
            yield partial(thread.submit, ask)
        finally:
            process.kill()


@contextmanager
def two_readers(
    read: Callable[[Item], Value], items: Sequence[Item], num_bytes: int
) -> Iterator[Callable[[Item], Value]]:
    """Yields ``read`` for these items, of so many bytes, which are read in this order.

    Where they are long, a second process begins with the last of them meanwhile. What it does not read this
    process reads.
    """
    with second_process() if num_bytes >= LONG_BYTES else nullcontext() as call:
        if call is None:
            yield read
            return
        answers: dict[Item, Future[Value]] = {item: call(read, item) for item in reversed(items)}

        def read_or_take(item: Item) -> Value:
            answer = answers.pop(item)  # the values of long files are the largest there are: none is kept here
            is_ours = answer.cancel() or answer.exception() is not None
            return read(item) if is_ours else answer.result()

        yield read_or_take


def _started() -> tuple["subprocess.Popen[bytes]", Connection] | None:
    """A process that answers calls, and the connection to it; None where no process can be started."""
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


def answer_calls() -> None:
    """The second process: answers calls until nobody calls any more, or one raises an error."""
    with Connection(sys.stdin.fileno()) as connection, suppress(EOFError, OSError):
        while True:
            function, *values = connection.recv()
            connection.send(function(*values))
