"""The replays of one pass in either mode, and the number of its operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchctl.micro.inside import WorkerError, first_line, is_out_of_memory
from benchctl.micro.inside.model import ForwardPass, Model, PassPoint
from benchctl.micro.inside.replays import CpuDevice, CudaDevice, Work, timed_replays, warm_up


class Passes:
    """The passes of one model on one device, of which the last stays prepared for the other mode."""

    def __init__(self, device: CpuDevice | CudaDevice, model: Model) -> None:
        self._device, self._model = device, model
        self._prepared: ForwardPass | None = None
        self._graph: Work | None = None
        self._num_operators = 0

    def measure(self, point: PassPoint, mode: str, *, warmups: int, replays: int) -> dict[str, Any]:
        """Times of ``replays``, as fields of a message.

        Raises WorkerError for a mode that this device does not have, a capture that fails, and outputs that are
        not finite or that differ between the modes by more than rounding.
        """
        forward = self.prepared(point)
        if mode == "graph" and self._graph is None:
            self._graph = self._captured(forward, warmups)
        replay = self._graph if mode == "graph" and self._graph is not None else forward.run
        warm_up(self._device, replay, warmups)
        if not forward.logits.isfinite().all():
            raise WorkerError(
                "outputs",
                f"{point} of {self._model.name}: outputs are not finite, so that its times mean nothing; choose "
                "dtype bfloat16 or float32",
            )
        return {**timed_replays(self._device, replay, replays), "num_operators": self._num_operators}

    def prepared(self, point: PassPoint) -> ForwardPass:
        """The pass of a point, run once."""
        if self._prepared is None or self._prepared.point != point:
            self._prepared = self._graph = None  # before the next one takes its memory
            forward = self._model.make(point)
            self._num_operators = count_operators(forward.run)
            self._prepared = forward
        return self._prepared

    def _captured(self, forward: ForwardPass, warmups: int) -> Work:
        """The graph of a pass, whose outputs are the eager ones."""
        warm_up(self._device, forward.run, 1)
        eager, name = forward.logits.clone(), f"{forward.point} of {self._model.name}"
        try:
            graph = self._device.capture(forward.run, warmups)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise WorkerError(
                "capture",
                f"{name}: the capture of its graph failed ({first_line(error)}); measure mode eager alone, or name "
                "an interpreter with another version of torch with --python",
            ) from error
        warm_up(self._device, graph, 1)
        difference = forward.difference(eager)
        if not difference <= forward.tolerance:  # not finite included
            raise WorkerError(
                "outputs",
                f"{name}: the outputs of graph and eager differ by {difference:.3g} of the largest, and rounding "
                f"explains {forward.tolerance:.3g}; do not measure mode graph with this version of torch; name "
                "another with --python",
            )
        return graph


def count_operators(work: Callable[[], None]) -> int:
    """Operators that compute in one run, about as many launches as a GPU sees.

    Views, which launch nothing, are not counted. An operator that torch composes of others counts once; a library
    may launch more than one kernel for it, such as a product that it splits.
    """
    with _Counter() as counter:
        work()
    return counter.count


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and to skip the compiler torch would first import it, for a second."""
        return False

    def __torch_dispatch__(
        self, operator: torch._ops.OpOverload, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # No view, in which a result shares memory with an argument and nothing is written
        results = operator._schema.returns  # noqa: SLF001 - it has no public name
        self.count += all(result.alias_info is None or result.alias_info.is_write for result in results)
        return operator(*args, **(kwargs or {}))
