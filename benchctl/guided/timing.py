"""Durations of the sections of a guided step: one line of JSON for each step.

On the clock of the host a section is the time that the host spent in it. Work for a GPU is only launched there, and
the first blocking call is charged for all queued GPU work, so such times are not those of components. On the clock
of the device a section lasts from when the GPU reaches its beginning until it reaches its end. Nothing waits for
that: a line is written when its events have passed, by a later step or, when no step follows, a moment later by a
thread.

A line says in ``clock`` whose times its ``sections_ns`` are, all of them. One of the device's has those of the
host as well, as ``host_sections_ns``: the step around it is timed on the host, and only times of the host are parts
of it.

Sections lie in one another and their times with them: ``sampler_total`` is the server's whole sampler, ``pre_lvm``
its part before the guidance and ``sample`` the one after it. ``lvm_apply_outer``, the guidance, holds
``lvm_build_pending`` (with ``candidate_selection``), ``value_model_load`` where the step loads it, ``lvm_forward``
(with ``value_prefill`` and, in two phases, ``value_extend``) and ``lvm_apply_guidance``.
"""

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import torch

from benchctl.guided.operations import Arriving
from benchctl.guided.params import GuidanceError, GuideStep
from benchctl.units import NS_PER_MS

Clock: TypeAlias = Literal["host", "device"]
CLOCKS: Final[tuple[Clock, ...]] = get_args(Clock)

SECTIONS: Final = (
    "sampler_total",
    "pre_lvm",
    "lvm_apply_outer",
    "lvm_build_pending",
    "candidate_selection",
    "value_model_load",
    "lvm_forward",
    "value_prefill",
    "value_extend",
    "lvm_apply_guidance",
    "sample",
)
"""All names, each after those that it lies in."""

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class PendingStep:
    """Counts of a step, some of which the device may still be computing."""

    def __init__(self, counted: GuideStep, counts: Arriving | None = None) -> None:
        """``counts`` are the numbers of candidates of the rows, 0 in those that are not guided."""
        self._counted, self._counts = counted, counts

    @property
    def is_known(self) -> bool:
        return self._counts is None or self._counts.is_here

    @property
    def step(self) -> GuideStep:
        """The counts; waits for the device if necessary."""
        if self._counts is None:
            return self._counted
        counts = self._counts.read()
        return replace(self._counted, guided_rows=sum(count > 0 for count in counts), candidates=sum(counts))


class StepTimer:
    """Takes times of sections and appends a line for each step to ``path``; without a path it does nothing.

    For one thread, which also records the events of the device. ``close`` writes what still waits for the device.
    ``make_event`` gives the marks of the device's clock.
    """

    def __init__(
        self, path: Path | None, clock: Clock = "host", make_event: Callable[[], torch.cuda.Event] | None = None
    ) -> None:
        if clock not in CLOCKS:
            raise GuidanceError(f"clock is {clock!r}; take one of {', '.join(CLOCKS)}")
        if clock == "device" and path is not None and make_event is None and not torch.cuda.is_available():
            raise GuidanceError("clock is 'device' and there is no CUDA device here; take 'host'")
        self._file = (
            None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        )
        self._clock: Final = clock
        self._make_event = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._steps = 0
        self._sections: list[_Section] = []
        self._waiting: deque[_Step] = deque()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        if clock == "device" and self._file is not None:
            threading.Thread(target=self._write_when_idle, name="guided-step-log", daemon=True).start()

    def section(self, name: str) -> AbstractContextManager[object]:
        """Adds the time spent inside to a section of this step; a name may come several times."""
        if self._file is None:
            return _NOTHING
        section = _Section(name, (self._make_event(), self._make_event()) if self._clock == "device" else None)
        self._sections.append(section)
        return section

    def end_step(self, later: PendingStep | None = None, **fields: int | bool | None) -> None:
        """Write the step with these fields beside its times; those that are None are unknown and left out.

        Steps are numbered from 0, unless a field ``step`` says otherwise.
        """
        if self._file is None:
            return
        end_ns = time.monotonic_ns()
        sections, self._sections = self._sections, []
        line: dict[str, int | str | bool | None] = {
            "step": self._steps,
            "clock": self._clock,
            "start_ns": sections[0].start_ns if sections else end_ns,
            "end_ns": end_ns,
            **fields,
        }
        self._steps += 1
        with self._lock:
            self._waiting.append(_Step(line, sections, later))
            self._write_finished()

    def drop_step(self) -> None:
        """Forget the sections since the last step: there was nothing to tell of."""
        self._sections = []

    def close(self) -> None:
        """Write all lines, waiting for the device if need be; nothing is timed after that."""
        self._is_closed.set()
        with self._lock:
            if self._file is not None:
                self._write_finished(waits=True)
                os.close(self._file)
                self._file = None

    def _write_when_idle(self) -> None:
        """Steps end one another's waiting; the last one before a pause has nobody else."""
        while not self._is_closed.wait(0.1):
            with self._lock:
                if self._file is not None:
                    self._write_finished()

    def _write_finished(self, *, waits: bool = False) -> None:
        while self._waiting:
            step = self._waiting[0]
            if not (step.is_over or waits or len(self._waiting) > 1024):
                return
            self._waiting.popleft()
            content = json.dumps(step.content(self._clock), separators=(",", ":")).encode() + b"\n"
            assert self._file is not None  # noqa: S101 - only an open timer has steps
            if os.write(self._file, content) != len(content):
                raise OSError("a line of the step log could not be written; the disk may be full")


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that ended on the host."""

    line: dict[str, int | str | bool | None]
    sections: "list[_Section]"
    later: PendingStep | None

    @property
    def is_over(self) -> bool:
        return all(section.is_over for section in self.sections) and (self.later is None or self.later.is_known)

    def content(self, clock: Clock) -> Mapping[str, object]:
        """The content of its line. Waits for the device where the step is not over."""
        fields = self.line | (asdict(self.later.step) if self.later is not None else {})
        times = {"sections_ns": _sums((section.name, section.host_ns) for section in self.sections)}
        if clock == "device":
            times["host_sections_ns"] = times["sections_ns"]
            times["sections_ns"] = _sums((section.name, section.device_ns()) for section in self.sections)
        return {name: value for name, value in fields.items() if value is not None} | times


class _Section:
    """One stretch of time on the host and, where it has marks, on the current stream of the device."""

    __slots__ = ("_marks", "host_ns", "name", "start_ns")

    def __init__(self, name: str, marks: tuple[torch.cuda.Event, torch.cuda.Event] | None) -> None:
        self.name, self._marks = name, marks
        self.start_ns = self.host_ns = 0

    def __enter__(self) -> None:
        self.start_ns = time.monotonic_ns()
        if self._marks is not None:
            self._marks[0].record()

    def __exit__(self, *_error: object) -> None:
        if self._marks is not None:
            self._marks[1].record()
        self.host_ns = time.monotonic_ns() - self.start_ns

    @property
    def is_over(self) -> bool:
        return self._marks is None or bool(self._marks[1].query())

    def device_ns(self) -> int:
        """Between the marks; waits for the end."""
        assert self._marks is not None  # noqa: S101 - asked of a timer of the device's clock alone
        start, end = self._marks
        end.synchronize()
        return round(float(start.elapsed_time(end)) * NS_PER_MS)


def _sums(durations_ns: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums = Counter[str]()
    for name, duration_ns in durations_ns:
        sums[name] += duration_ns
    return dict(sums)
