"""The steps of a vLLM worker: their numbers, and the log of guided ones."""

import functools
import importlib
from contextlib import AbstractContextManager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

from benchctl.guided.timing import Clock, PendingStep, StepTimer

V2_SAMPLER: Final = "vllm.v1.worker.gpu.sample.sampler.Sampler"
_SAMPLE: Final = "__call__"
_WARM_UP: Final = "compile_or_warm_up_model"


class StepCount:
    """``number`` is that of the step that is sampled now, from 0; -1 before the first."""

    def __init__(self) -> None:
        self.number = -1

    def watch(self, sampler: type, worker: type) -> None:
        """Count calls of ``sampler`` from now on, from 0 where a ``worker`` is warm."""
        sample, warm_up = getattr(sampler, _SAMPLE), getattr(worker, _WARM_UP)

        @functools.wraps(sample)
        def counting(*given: Any, **named: Any) -> Any:
            self.number += 1
            return sample(*given, **named)

        @functools.wraps(warm_up)
        def starting(*given: Any, **named: Any) -> Any:
            result = warm_up(*given, **named)
            self.number = -1
            return result

        setattr(sampler, _SAMPLE, counting)
        setattr(worker, _WARM_UP, starting)


def class_named(name: str) -> type:
    """The class of a name as vLLM writes it, ``package.module.Class``."""
    module, _, attribute = name.rpartition(".")
    cls: type = getattr(importlib.import_module(module), attribute)
    return cls


class GuidedStepLog(StepTimer):
    """Times vLLM's sampler and the guidance within it, and writes what guidance did. For one thread."""

    def __init__(self, path: Path, clock: Clock = "host", **given: Any) -> None:
        super().__init__(path, clock, **given)
        self._is_in_sampler = False
        self._stage: AbstractContextManager[object] | None = None
        self._did: tuple[PendingStep, dict[str, int]] | None = None
        # Workers are processes of multiprocessing, which end without what the interpreter does at its exit.
        Finalize(None, self.close, exitpriority=0)

    def begin(self) -> None:
        """Say that the guidance of a step begins."""
        self._end_stage()

    def record(self, *, step: int, num_seqs: int, did: PendingStep) -> None:
        """Say what it did, when it ends; the line is written when the sampler is done."""
        self._did = did, {"step": step, "num_seqs": num_seqs}
        if self._is_in_sampler:
            self._begin_stage("sample")
        else:
            self._end_guided_step()

    def watch_sampler(self, sampler: type, method: str = "forward") -> None:
        """Time vLLM's sampler from now on, by the method that is called to sample."""
        forward = getattr(sampler, method)

        @functools.wraps(forward)
        def timed(*given: Any, **named: Any) -> Any:
            self._is_in_sampler = True
            try:
                with self.section("sampler_total"):
                    self._begin_stage("pre_lvm")
                    try:
                        return forward(*given, **named)
                    finally:
                        self._end_stage()
            finally:
                self._is_in_sampler = False
                self._end_guided_step()

        setattr(sampler, method, timed)

    def _begin_stage(self, name: str) -> None:
        self._stage = self.section(name)
        self._stage.__enter__()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage.__exit__(None, None, None)
            self._stage = None

    def _end_guided_step(self) -> None:
        if self._did is None:
            self.drop_step()
            return
        (did, numbers), self._did = self._did, None
        self.end_step(did, **numbers)
