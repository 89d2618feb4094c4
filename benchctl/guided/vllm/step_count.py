"""The numbers of the steps of a worker of vLLM's Model Runner V2, as in vLLM's own record of each step.

V2 does not ask a processor in a step that has nothing for it, so steps are counted by the calls of the sampler:
there is one in each step that computes anything. A worker samples before its first step as well, to warm up. Those
calls are not steps of the server, and the count starts when the worker reports that it is warm.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

V2_SAMPLER: Final = "vllm.v1.worker.gpu.sample.sampler.Sampler"
_WARM_UP: Final = "compile_or_warm_up_model"


class StepCount:
    """``number`` is that of the step that is sampled now, from 0; -1 before the first."""

    def __init__(self) -> None:
        self.number = -1

    def watch(self, sampler: type, worker: type) -> None:
        """Count calls of ``sampler`` from now on, from 0 where a ``worker`` is warm."""
        for owner, name, around in ((sampler, "__call__", self._counting), (worker, _WARM_UP, self._starting)):
            setattr(owner, name, around(getattr(owner, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counting(*given: Any, **named: Any) -> Any:
            self.number += 1
            return call(*given, **named)

        return counting

    def _starting(self, warm_up: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(warm_up)
        def starting(*given: Any, **named: Any) -> Any:
            result = warm_up(*given, **named)
            self.number = -1
            return result

        return starting


def class_named(name: str) -> type:
    """The class of a name as vLLM writes it, ``package.module.Class``."""
    module, _, attribute = name.rpartition(".")
    cls: type = getattr(importlib.import_module(module), attribute)
    return cls
