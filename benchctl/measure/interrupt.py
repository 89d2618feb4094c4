"""Coroutines that Ctrl-C, SIGTERM and a closed terminal end in an orderly way.

A signal cancels the coroutine, which then cleans up; only after that KeyboardInterrupt is raised. By default the
latter two would end the process at once and leave its servers running.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import uvloop

from benchctl.load.process import allow_many_open_files

T = TypeVar("T")

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OF_SCHEDULERS: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which job systems warn of the end of a job; most let the user choose which."""
_SIGNAL_WAIT_S: Final = 1.0
"""Time in which a signal to all processes of a job reaches this one, too."""


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``. Raises KeyboardInterrupt after its end if a signal came meanwhile.

    The first signal cancels it; later ones have no effect, so that they do not interrupt the clean-up.
    """
    allow_many_open_files()
    cancels: list[Callable[[], object]] = []

    def cancel() -> None:
        while cancels:
            cancels.pop()()

    handler = _Handler(cancel)

    async def cancellable() -> T:
        task = asyncio.current_task()
        if task is not None:
            cancels.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        try:
            if handler.has_come:
                main.close()
                raise asyncio.CancelledError
            return await main
        finally:
            cancels.clear()

    try:
        # The handlers are installed outside the loop: an exception of a handler inside would break it.
        with handler.installed(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(cancellable())
    except (Exception, asyncio.CancelledError) as error:
        if handler.has_come:  # what fails then fails by the signal: others may get it, too, such as the server
            raise KeyboardInterrupt from error
        raise
    if handler.has_come:
        raise KeyboardInterrupt
    return result


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal raise KeyboardInterrupt as Ctrl-C does: for code without a loop.

    Only the first signal does, also where a coroutine inside took it: later ones would interrupt the clean-up.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    with _Handler(interrupt).installed():
        yield


@contextmanager
def warned_by_scheduler() -> Iterator[None]:
    """``interruptible`` also by the signals of job systems, for this code and for coroutines inside."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with _Handler(interrupt, also=_OF_SCHEDULERS).installed():
        yield


def await_signal() -> None:
    """Wait a moment for a signal that may have ended another process of this job just now; else no effect.

    Outside of a job's task there is nothing to wait for.
    """
    if isinstance(signal.getsignal(signal.SIGUSR1), _Handler):
        time.sleep(_SIGNAL_WAIT_S)


class _Handler:
    """Calls ``act`` on the first signal; the handlers around it learn that one came, and do not act on another."""

    def __init__(self, act: Callable[[], object], also: Iterable[signal.Signals] = ()) -> None:
        """``also`` names signals beside those that always end us."""
        self._act = act
        self._also = tuple(also)
        self.has_come = False
        self._before: dict[int, Any] = {}

    def __call__(self, number: int, _frame: object) -> None:
        is_first = not self.has_come
        self.note(number)
        if is_first:
            self._act()

    def note(self, number: int) -> None:
        self.has_come = True
        if isinstance(around := self._before[number], _Handler):
            around.note(number)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals that end us, except those that are ignored (nohup, background jobs), and those that a
        handler of this kind around this one handles.

        No effect outside the main thread, where Python allows no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        inherited = (each for each in _OF_SCHEDULERS if isinstance(signal.getsignal(each), _Handler))
        before = {number: signal.getsignal(number) for number in (*_ENDING, *self._also, *inherited)}
        self._before = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self)
        try:
            yield
        finally:
            for number, earlier in self._before.items():
                signal.signal(number, earlier)


@contextmanager
def noting_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the signals that end us are only noted; the value tells whether one came.

    For code that starts processes: an exception between a start and its record would leave one behind. After the
    context KeyboardInterrupt is raised if a signal came.
    """
    handler = _Handler(lambda: None)
    with handler.installed():
        yield lambda: handler.has_come
    if handler.has_come:
        raise KeyboardInterrupt
