"""The log of guided steps of a vLLM server: one line of JSON for each step that had a row to guide.

``step`` counts the steps of the server from 0, as ``iteration_index`` of vLLM's own record of the step does, so
that the two can be put together; ``num_seqs`` is the size of the batch, by which that can be checked. ``start_ns``
and ``end_ns`` are those of vLLM's sampler, on CLOCK_MONOTONIC. Sections and their clocks are those of ``timing``.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from benchctl.guided.guide_step import PendingStep
from benchctl.guided.timing import Clock, StepTimer


class GuidedStepLog:
    """Times vLLM's sampler and the guidance within it, and writes what guidance did. For one thread."""

    def __init__(self, path: Path, clock: Clock = "host") -> None:
        self._timer = StepTimer(path, clock)
        self._is_in_sampler = False
        self._stage: AbstractContextManager[object] | None = None
        self._did: tuple[PendingStep, dict[str, int]] | None = None
        # Workers are processes of multiprocessing, which end without what the interpreter does at its exit.
        Finalize(self, self._timer.close, exitpriority=0)

    def section(self, name: str) -> AbstractContextManager[object]:
        return self._timer.section(name)

    def begin(self) -> None:
        """Say that the guidance of a step begins."""
        self._end_stage()

    def record(self, *, step: int, num_seqs: int, did: PendingStep) -> None:
        """Say what it did, when it ends; the line is written when the sampler is done."""
        self._did = did, {"step": step, "num_seqs": num_seqs}
        if self._is_in_sampler:
            self._begin_stage("sample")
        else:
            self._end_step()

    def watch_sampler(self, sampler: type, method: str = "forward") -> None:
        """Time vLLM's sampler from now on, by the method that is called to sample."""
        setattr(sampler, method, self._timed(getattr(sampler, method)))

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def timed(*given: Any, **named: Any) -> Any:
            self._is_in_sampler = True
            try:
                with self._timer.section("sampler_total"):
                    self._begin_stage("pre_lvm")
                    try:
                        return forward(*given, **named)
                    finally:
                        self._end_stage()
            finally:
                self._is_in_sampler = False
                self._end_step()

        return timed

    def _begin_stage(self, name: str) -> None:
        self._stage = self._timer.section(name)
        self._stage.__enter__()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage.__exit__(None, None, None)
            self._stage = None

    def _end_step(self) -> None:
        if self._did is None:
            self._timer.drop_step()
            return
        (did, numbers), self._did = self._did, None
        self._timer.end_step(did, **numbers)
