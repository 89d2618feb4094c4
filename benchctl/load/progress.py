"""How far a load has come: waiting until something is so, and the first fault on the way there."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Wakes who waits for a load whenever something has changed, and ends all waiting with the first fault.

    A record that cannot be kept (a full disk) ends the load: its numbers would be lost one by one.
    """

    def __init__(self) -> None:
        self._has_changed = asyncio.Event()
        self._fault: BaseException | None = None

    def change(self) -> None:
        """Something has changed that others may wait for."""
        self._has_changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so. Raises the first fault that is noted before or meanwhile."""
        await self.wait(lambda: self._fault is not None or is_so())
        self.raise_fault()

    async def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, whatever faults there are."""
        while not is_so():
            self._has_changed.clear()
            await self._has_changed.wait()

    def note_fault(self, fault: BaseException) -> None:
        """Keep it, if it is the first."""
        self._fault = self._fault or fault
        self.change()

    def raise_fault(self) -> None:
        """Raises the fault that was noted, if there is one."""
        if self._fault is not None:
            raise self._fault

    def follow(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        """Note the fault with which ``task`` ends, if it does."""
        task.add_done_callback(self._note_fault_of)
        return task

    def _note_fault_of(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.note_fault(fault)

    @contextmanager
    def noting_faults_of_the_loop(self) -> Iterator[None]:
        """A fault in what the event loop calls ends the load, and does not stall it."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            fault = context.get("exception")
            if isinstance(fault, BaseException):
                self.note_fault(fault)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(note)
        try:
            yield
        finally:
            loop.set_exception_handler(before)
