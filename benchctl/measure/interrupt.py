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
    except asyncio.CancelledError:
        if handler.has_come:
            raise KeyboardInterrupt from None
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


class _Handler:
    """Calls ``act`` on the first signal; the handlers around it learn that one came, and do not act on another."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
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
        """Handle the signals that end us, except those that are ignored (nohup, background jobs).

        No effect outside the main thread, where Python allows no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _ENDING}
        self._before = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self)
        try:
            yield
        finally:
            for number, earlier in self._before.items():
                signal.signal(number, earlier)
