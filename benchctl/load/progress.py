"""The progress of a load: tasks wait for conditions, and the first error ends all waiting."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Wakes waiting tasks whenever something has changed, and ends all waiting with the first error.

    A record that cannot be stored (a full disk) ends the load: its numbers would be lost one by one.
    """

    def __init__(self) -> None:
        self._has_changed = asyncio.Event()
        self._error: BaseException | None = None

    def change(self) -> None:
        """Report that something has changed that others may wait for."""
        self._has_changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds. Raises the first error that is recorded before or meanwhile."""
        await self.wait(lambda: self._error is not None or condition())
        self.raise_error()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds, whatever errors there are."""
        while not condition():
            self._has_changed.clear()
            await self._has_changed.wait()

    def record_error(self, error: BaseException) -> None:
        self._error = self._error or error
        self.change()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def follow(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        """Record the error with which ``task`` ends, if it does."""
        task.add_done_callback(self._record_error_of)
        return task

    def _record_error_of(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.record_error(error)

    @contextmanager
    def recording_loop_errors(self) -> Iterator[None]:
        """Record errors in callbacks of the event loop: they end the load and do not stall it."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def record(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if isinstance(error, BaseException):
                self.record_error(error)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(record)
        try:
            yield
        finally:
            loop.set_exception_handler(before)
