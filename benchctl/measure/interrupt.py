"""Running a coroutine so that Ctrl-C, SIGTERM and a terminal that closes end it in good order.

A signal cancels the coroutine, whose cleaning up then runs to its end; only after that KeyboardInterrupt is
raised. Left alone, the latter two would end the process at once and leave its servers behind.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import uvloop

from benchctl.load.process import allow_many_open_files

T = TypeVar("T")

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``. Raises KeyboardInterrupt after it has ended, when a signal came meanwhile.

    The first signal cancels; those after it change nothing, lest they cut short the cleaning up.
    """
    allow_many_open_files()
    came: list[int] = []
    cancels: list[Callable[[], object]] = []

    def heed(number: int, _frame: object) -> None:
        came.append(number)
        while cancels:
            cancels.pop()()

    async def cancellable() -> T:
        task = asyncio.current_task()
        if task is not None:
            cancels.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        try:
            if came:
                main.close()
                raise asyncio.CancelledError
            return await main
        finally:
            cancels.clear()

    try:
        # The handlers stand around the loop: an exception raised by one inside it would break it.
        with _handled_by(heed), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(cancellable())
    except asyncio.CancelledError:
        if came:
            raise KeyboardInterrupt from None
        raise
    if came:
        raise KeyboardInterrupt
    return result


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
