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
OF_SCHEDULERS: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which job systems warn of the end of a job; most let the user choose which."""


class _Handler:
    """Calls ``act`` on the first signal, and notes that one came."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.act = act
        self.has_come = False


_handlers: list[_Handler] = []
"""Those in effect, the innermost last. It alone acts; those around it learn that a signal came."""


def _on_signal(_number: int, _frame: object) -> None:
    innermost = _handlers[-1]
    is_first = not innermost.has_come
    for handler in _handlers:
        handler.has_come = True
    if is_first:
        innermost.act()


@contextmanager
def _installed(handler: _Handler, also: Iterable[signal.Signals] = ()) -> Iterator[None]:
    """Handle the signals that end us, and ``also`` these, except those that are ignored (nohup, background jobs).

    No effect outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_ENDING, *also)}
    handled = [number for number, earlier in before.items() if earlier is not signal.SIG_IGN]
    _handlers.append(handler)
    for number in handled:
        signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
        _handlers.remove(handler)


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``. Raises KeyboardInterrupt after its end if a signal came meanwhile.

    The first signal cancels it; later ones have no effect, so that they do not interrupt the clean-up.
    """
    allow_many_open_files()
    handler = _Handler()

    async def cancellable() -> T:
        if (task := asyncio.current_task()) is not None:
            handler.act = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        try:
            if handler.has_come:
                main.close()
                raise asyncio.CancelledError
            return await main
        finally:
            handler.act = _Handler().act

    try:
        # The handlers are installed outside the loop: an exception of a handler inside would break it.
        with _installed(handler), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(cancellable())
    except (Exception, asyncio.CancelledError) as error:
        if handler.has_come:  # what fails then fails by the signal: others may get it, too, such as the server
            raise KeyboardInterrupt from error
        raise
    if handler.has_come:
        raise KeyboardInterrupt
    return result


@contextmanager
def interruptible(also: Iterable[signal.Signals] = ()) -> Iterator[None]:
    """Inside, SIGTERM, a closed terminal and the signals in ``also`` raise KeyboardInterrupt as Ctrl-C does.

    That is for code without a loop, and ``also`` for coroutines inside. Only the first signal does, also where a
    coroutine inside took it: later ones would interrupt the clean-up.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    with _installed(_Handler(interrupt), also):
        yield


def await_signal() -> None:
    """Wait a moment for a signal that may have ended another process of this job just now; else no effect.

    Outside of a job's task there is nothing to wait for.
    """
    if signal.getsignal(signal.SIGUSR1) is _on_signal:
        # Time in which a signal to all processes of a job reaches this one, too
        time.sleep(1.0)


@contextmanager
def noting_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the signals that end us are only noted; the value tells whether one came.

    For code that starts processes: an exception between a start and its record would leave one behind. After the
    context KeyboardInterrupt is raised if a signal came.
    """
    handler = _Handler()
    with _installed(handler):
        yield lambda: handler.has_come
    if handler.has_come:
        raise KeyboardInterrupt
