"""Programs for an interpreter with torch: they import torch and the standard library, and nothing of benchctl."""


class WorkerError(Exception):
    """A measurement that cannot be made; the worker goes on to live.

    ``kind`` says what it lacks: ``settings`` that describe a measurement, ``torch``, the ``device``, ``memory``, a
    graph that can be captured (``capture``), ``outputs`` that are finite and agree.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of torch's allocators and of the system's."""
    return isinstance(error, MemoryError) or (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )


def first_line(error: BaseException) -> str:
    """The beginning of an error's message: torch appends pages of advice."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
