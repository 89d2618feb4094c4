"""The failures that a worker reports to the process that started it."""

from typing import Literal

FailureKind = Literal["settings", "torch", "device", "memory", "capture", "outputs", "internal"]


class WorkerError(Exception):
    """A measurement that cannot be made; the worker goes on to live.

    ``kind`` says what it lacks: ``settings`` that describe a measurement, ``torch``, the ``device``, ``memory``, a
    graph that can be captured, ``outputs`` that agree; ``internal`` is anything that was not foreseen.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
