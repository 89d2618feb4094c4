"""Coroutines that Ctrl-C, SIGTERM and a closed terminal end in an orderly way.

A signal cancels the coroutine, which then cleans up; only after that KeyboardInterrupt is raised. By default the
latter two would end the process at once and leave its servers running.
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
    """The result of ``main``. Raises KeyboardInterrupt after its end if a signal came meanwhile.

    The first signal cancels it; later ones have no effect, so that they do not interrupt the clean-up.
    """
    allow_many_open_files()
    signals: list[int] = []
    cancels: list[Callable[[], object]] = []

    def handle(number: int, _frame: object) -> None:
        signals.append(number)
        while cancels:
            cancels.pop()()

    async def cancellable() -> T:
        task = asyncio.current_task()
        if task is not None:
            cancels.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        try:
            if signals:
                main.close()
                raise asyncio.CancelledError
            return await main
        finally:
            cancels.clear()

    try:
        # The handlers are installed outside the loop: an exception of a handler inside would break it.
        with _handled_by(handle), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(cancellable())
    except asyncio.CancelledError:
        if signals:
            raise KeyboardInterrupt from None
        raise
    if signals:
        raise KeyboardInterrupt
    return result


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal raise KeyboardInterrupt as Ctrl-C does: for code without a loop."""

    def handle(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with _handled_by(handle):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Install a handler for the signals that end us, except those that are ignored (nohup, background jobs).

    No effect outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
