"""How long the sections of a guided step take: one line of JSON for each step.

On the clock of the host a section is the time that the host spent in it. Work for a GPU is only launched there, and
whatever first waits for the GPU pays for everything before, so such times are no times of components. On the clock
of the device a section lasts from when the GPU reaches its beginning until it reaches its end; nothing waits for
that, lines are written when their events have passed.

Sections lie in one another and their times with them: ``lvm_apply_outer`` holds ``lvm_build_pending`` (with
``candidate_selection``), ``lvm_forward`` (with ``value_model_load``, ``value_prefill`` and, in two phases,
``value_extend``) and ``lvm_apply_guidance``.
"""

import json
import os
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, TypeAlias

import torch

from benchctl.guided.errors import GuidanceError
from benchctl.units import NS_PER_MS

Clock: TypeAlias = Literal["host", "device"]

SECTIONS: Final = (
    "pre_lvm",
    "lvm_apply_outer",
    "lvm_build_pending",
    "candidate_selection",
    "lvm_forward",
    "value_model_load",
    "value_prefill",
    "value_extend",
    "lvm_apply_guidance",
    "sample",
)
"""Names that step records know."""

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()
_MAX_WAITING_STEPS: Final = 1024


class StepTimer:
    """Takes times of sections and appends a line for each step to ``path``; without a path it does nothing.

    Not for several threads. ``close`` writes what is still waiting for the device.
    """

    def __init__(self, path: Path | None, clock: Clock = "host") -> None:
        if clock == "device" and path is not None and not torch.cuda.is_available():
            raise GuidanceError("clock is 'device' and there is no CUDA device here; take 'host'")
        self._file = (
            None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        )
        self._clock = clock
        self._steps = 0
        self._start_ns = 0
        self._sections: list[_Section] = []
        self._waiting: deque[tuple[dict[str, object], list[_Section]]] = deque()

    def section(self, name: str) -> AbstractContextManager[object]:
        """Adds the time spent inside to a section of this step; a name may come several times."""
        if self._file is None:
            return _NOTHING
        if not self._sections:
            self._start_ns = time.monotonic_ns()
        section = _HostSection(name) if self._clock == "host" else _DeviceSection(name)
        self._sections.append(section)
        return section

    def end_step(self, **fields: int | bool | None) -> None:
        """Write the step with these fields beside its times; those that are None are unknown and left out."""
        if self._file is None:
            return
        end_ns = time.monotonic_ns()
        line: dict[str, object] = {
            "step": self._steps,
            "clock": self._clock,
            "start_ns": self._start_ns or end_ns,
            "end_ns": end_ns,
        }
        line |= {name: value for name, value in fields.items() if value is not None}
        self._steps += 1
        sections, self._sections, self._start_ns = self._sections, [], 0
        self._waiting.append((line, sections))
        self._write_finished()

    def close(self) -> None:
        """Write all lines, waiting for the device if need be; nothing is timed after that."""
        if self._file is not None:
            self._write_finished(waits=True)
            os.close(self._file)
            self._file = None

    def _write_finished(self, *, waits: bool = False) -> None:
        while self._waiting:
            line, sections = self._waiting[0]
            if not all(section.is_over for section in sections):
                if not waits and len(self._waiting) <= _MAX_WAITING_STEPS:
                    return
                torch.cuda.synchronize()
            self._waiting.popleft()
            self._write(line | {"sections_ns": _sums(sections)})

    def _write(self, line: dict[str, object]) -> None:
        assert self._file is not None  # noqa: S101 - only an open timer has steps
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, content) != len(content):
            raise OSError("a line of the step log could not be written; the disk may be full")


class _HostSection:
    """One stretch of time on the host."""

    __slots__ = ("_start_ns", "duration_ns", "name")
    is_over = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.duration_ns = 0

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.duration_ns = time.monotonic_ns() - self._start_ns


class _DeviceSection:
    """One stretch of time on the current stream of the device."""

    __slots__ = ("_end", "_start", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def __enter__(self) -> None:
        self._start.record()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.record()

    @property
    def is_over(self) -> bool:
        return bool(self._end.query())

    @property
    def duration_ns(self) -> int:
        return int(self._start.elapsed_time(self._end) * NS_PER_MS)


_Section: TypeAlias = _HostSection | _DeviceSection


def _sums(sections: list[_Section]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for section in sections:
        sums[section.name] = sums.get(section.name, 0) + section.duration_ns
    return sums
