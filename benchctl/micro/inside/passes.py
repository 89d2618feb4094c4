"""The passes that a worker keeps: prepared once for each point, and replayed in either mode.

A pass is prepared when it is measured for the first time and stays, so that modes and points that take turns do not
pay for it again; where memory is short, those that were not used for longest make room.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchctl.micro.inside.dimensions import PassPoint, WorkerError
from benchctl.micro.inside.model import GIB, ForwardPass, Model
from benchctl.micro.inside.replays import CpuDevice, CudaDevice, Work, timed_replays, warm_up


@dataclass
class _Entry:
    forward: ForwardPass
    num_operators: int
    graph: Work | None = None
    difference: float | None = None


class PassStore:
    """Passes by point, of one model on one device."""

    def __init__(self, device: CpuDevice | CudaDevice, model: Model) -> None:
        self._device, self._model = device, model
        self._entries: OrderedDict[PassPoint, _Entry] = OrderedDict()

    def measure(self, point: PassPoint, mode: str, *, warmups: int, replays: int) -> dict[str, Any]:
        """Times of ``replays``, as fields of a message.

        Raises WorkerError for a mode that this device does not have, a pass that does not fit into memory, a
        capture that fails, and outputs that are not finite or that differ between the modes by more than rounding.
        """
        with self._memory_failures(point):
            entry = self._entry(point)
            if mode == "graph" and entry.graph is None:
                entry.graph, entry.difference = self._capture(point, entry.forward, warmups)
            replay = entry.graph if mode == "graph" else entry.forward.run
            warm_up(self._device, replay, warmups)
            self._check_finite(point, entry.forward)
            times = timed_replays(self._device, replay, replays)
        difference = entry.difference if mode == "graph" else None
        return {**times, "num_operators": entry.num_operators, "output_difference": difference}

    def check_fits(self, points: Iterable[PassPoint]) -> None:
        """Raises WorkerError for a point that does not fit into memory by itself; nothing is allocated."""
        for point in points:
            self._make_room(point)

    def _entry(self, point: PassPoint) -> _Entry:
        if point not in self._entries:
            self._make_room(point)
            forward = self._model.make(point)
            self._entries[point] = _Entry(forward, count_operators(forward.run))
        self._entries.move_to_end(point)
        return self._entries[point]

    def _make_room(self, point: PassPoint) -> None:
        """Drop the passes that were not used for longest until this one fits; refused is one that never will."""
        cache, buffers = self._model.need(point)
        while cache + buffers > (free_bytes := self._device.free_bytes()):
            if not self._entries:
                raise WorkerError(
                    "memory",
                    f"{point} of {self._model.name}: keys and values need {cache / GIB:.2f} GiB and buffers "
                    f"{buffers / GIB:.2f} GiB, and {free_bytes / GIB:.2f} GiB are free beside the weights; choose "
                    "a smaller batch size, fewer tokens, a smaller model or a dtype of 2 bytes",
                )
            self._entries.popitem(last=False)

    def _capture(self, point: PassPoint, forward: ForwardPass, warmups: int) -> tuple[Work, float]:
        """The graph of a pass, and how far its outputs are from the eager ones."""
        warm_up(self._device, forward.run, 1)
        eager = forward.logits.clone()
        try:
            graph = self._device.capture(forward.run, warmups)
        except RuntimeError as error:
            if _is_out_of_memory(error):
                raise
            raise WorkerError(
                "capture",
                f"{point} of {self._model.name}: the capture of its graph failed ({first_line(error)}); measure "
                "mode eager alone, or name an interpreter with another version of torch with --python",
            ) from error
        warm_up(self._device, graph, 1)
        difference = forward.difference(eager)
        if not difference <= forward.tolerance:  # not finite included
            raise WorkerError(
                "outputs",
                f"{point} of {self._model.name}: the outputs of graph and eager differ by {difference:.3g} of the "
                f"largest, and rounding explains {forward.tolerance:.3g}; do not measure mode graph with this "
                "version of torch; name another with --python",
            )
        return graph, difference

    def _check_finite(self, point: PassPoint, forward: ForwardPass) -> None:
        if not forward.logits.isfinite().all():
            raise WorkerError(
                "outputs",
                f"{point} of {self._model.name}: outputs are not finite, so that its times mean nothing; choose "
                "dtype bfloat16 or float32",
            )

    @contextmanager
    def _memory_failures(self, point: PassPoint) -> Iterator[None]:
        """Memory that runs out nevertheless, because another program takes it or a library needs more."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            self._entries.pop(point, None)
            raise WorkerError(
                "memory",
                f"{point} of {self._model.name}: memory ran out ({first_line(error)}); choose a smaller batch "
                "size or fewer tokens, or end the programs that hold memory of the device",
            ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of torch's allocators and of the system's."""
    return isinstance(error, MemoryError) or (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )


def first_line(error: BaseException) -> str:
    """The beginning of an error's message: torch appends pages of advice."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


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
        self.count += not _is_view(operator)
        return operator(*args, **(kwargs or {}))


def _is_view(operator: torch._ops.OpOverload) -> bool:
    """True where a result shares memory with an argument and nothing is written."""
    results = operator._schema.returns  # noqa: SLF001 - it has no public name
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)
