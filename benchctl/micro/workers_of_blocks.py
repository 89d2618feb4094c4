"""The workers of an experiment: a fresh process for every block, which measures all runs of it.

What differs from process to process, such as where its memory lies, is thus in the scatter of the blocks.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, Self

import psutil

from benchctl.micro.forward_times import ForwardTimes
from benchctl.micro.worker import WorkerInfo
from benchctl.profile.choices import ForwardPoint, Mode


class PassWorker(Protocol):
    """A process with a model in memory that computes forward passes."""

    def processes(self) -> list[psutil.Process]:
        """Its living processes."""

    @property
    def info(self) -> WorkerInfo:
        """Its device and software."""

    def check_fits(self, points: Sequence[ForwardPoint]) -> None:
        """Raises UsageError for a point that does not fit into the device's memory."""

    def measure(self, point: ForwardPoint, mode: Mode, *, warmups: int, replays: int) -> ForwardTimes:
        """The times of these replays.

        Raises UsageError where this pass cannot be computed here, and RunError where the process ended.
        """


class WorkersOfBlocks:
    """Inside the context, the worker of one block after the other; the first starts before its block is known."""

    def __init__(self, start: Callable[[], AbstractContextManager[PassWorker]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._worker: PassWorker | None = None
        self._block: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def first(self) -> PassWorker:
        """The worker of the block that comes next."""
        if self._worker is None:
            self._worker = self._stack.enter_context(self._start())
        return self._worker

    def of(self, block: int) -> PassWorker:
        """The worker of a block; that of another block is ended."""
        if self._block not in {None, block}:
            self.end()
        worker = self.first()
        self._block = block
        return worker

    def end(self) -> None:
        """End the worker, if there is one: the next run gets another."""
        self._worker = self._block = None
        self._stack.close()


def visible_devices(device: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES that names the device of a worker alone: empty for ``cpu``."""
    if not device.startswith("cuda"):
        return ""
    number = int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(number)
    entries = visible.split(",")
    return entries[number].strip() if number < len(entries) else ""
