"""Running a coroutine so that Ctrl-C, SIGTERM and a terminal that closes end it in good order.

A signal cancels the coroutine, whose cleaning up then runs to its end; only after that KeyboardInterrupt is
raised. Left alone, the latter two would end the process at once and leave its servers behind.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import uvloop

T = TypeVar("T")

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``. Raises KeyboardInterrupt after it has ended, when a signal came meanwhile."""
    came: list[int] = []
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_cancelled_by_signals(main, came))
    except asyncio.CancelledError:
        if came:
            raise KeyboardInterrupt from None
        raise
    if came:
        raise KeyboardInterrupt
    return result


async def _cancelled_by_signals(main: Coroutine[Any, Any, T], came: list[int]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def cancel(number: int, _frame: object) -> None:
        came.append(number)
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)

    with _handled_by(cancel):
        return await main


@contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    """A handler for the signals that end us, but for those that are ignored (nohup, jobs in the background).

    Outside the main thread, where Python allows none, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
