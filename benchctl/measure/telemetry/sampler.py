"""A thread that writes samples to a file while a load runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Final, Self

import msgspec

from benchctl.records.jsonl import JsonlWriter
from benchctl.records.record import ResultWarning

_FIRST_SAMPLE_S: Final = 5.0
"""Time that a load waits for the first sample before it starts without."""


class Sampler:
    """Inside the context, writes what ``samples`` yields to ``path``, one flushed line each.

    The context begins when the first sample is written, so that each load has a sample from before it. ``warnings``
    tells afterwards if sampling failed; the run continues without it.
    """

    def __init__(self, name: str, path: Path, samples: Callable[[Event], Iterator[msgspec.Struct]]) -> None:
        self.warnings: tuple[ResultWarning, ...] = ()
        self._name = name
        self._path = path
        self._samples = samples
        self._stopped = Event()
        self._begun = Event()
        self._thread = Thread(target=self._write, name=f"benchctl-{name}-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait(_FIRST_SAMPLE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            with JsonlWriter(self._path) as writer:
                for sample in self._samples(self._stopped):
                    writer.write(sample)
                    self._begun.set()
        except (OSError, ValueError) as error:
            message = f"the {self._name} sampler failed ({error}): its samples do not cover the whole load"
            self.warnings = (ResultWarning(code=f"{self._name}-sampler-failed", message=message),)
        finally:
            self._begun.set()
