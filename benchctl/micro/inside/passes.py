"""The passes that a worker keeps: prepared once for each point, and replayed in either mode.

A pass is prepared when it is measured for the first time and stays, so that modes and points that take turns do not
pay for it again; where memory is short, those that were not used for longest make room. Nothing here imports torch.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from benchctl.micro.inside.dimensions import PassPoint
from benchctl.micro.inside.failures import WorkerError
from benchctl.micro.inside.replays import Device, Work, captured, timed_replays, warm_up

GIB = 1 << 30


class PreparedPass(Protocol):
    """One point, ready to run."""

    tolerance: float
    """The largest difference of two outputs that rounding explains."""
    num_operators: int
    """Operators that one run calls."""

    def run(self) -> None: ...

    def outputs(self) -> Any:
        """A copy of what the last run computed."""

    def difference(self, outputs: Any) -> float:
        """The largest difference between ``outputs`` and those of the last run, in units of the largest output.

        NaN where either has a number that is not finite.
        """


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one pass, beside the weights."""

    cache_bytes: int
    buffer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + self.buffer_bytes


class PassMaker(Protocol):
    """Makes the passes of one model on one device."""

    name: str
    """Model, type of numbers and device, for messages."""

    def need(self, point: PassPoint) -> MemoryNeed:
        """Memory of the pass, without making it."""

    def make(self, point: PassPoint) -> PreparedPass:
        """Allocate it."""

    def free_bytes(self) -> int:
        """Memory that is free now; what dropped passes held is free again."""


@dataclass
class _Entry:
    prepared: PreparedPass
    graph: Work | None = None
    difference: float | None = None


class PassStore:
    """Passes by point, of one model on one device."""

    def __init__(self, device: Device, maker: PassMaker) -> None:
        self._device, self._maker = device, maker
        self._entries: OrderedDict[PassPoint, _Entry] = OrderedDict()

    def measure(self, point: PassPoint, mode: str, *, warmups: int, replays: int) -> dict[str, Any]:
        """Times of ``replays``, as fields of a message.

        Raises WorkerError for a mode that this device does not have, a pass that does not fit into memory, a
        capture that fails, and outputs that are not finite or that differ between the modes by more than rounding.
        """
        if mode not in {"eager", "graph"}:
            raise WorkerError("settings", f"mode is {mode!r}; it must be eager or graph")
        with self._memory_failures(point):
            entry = self._entry(point)
            if mode == "graph" and entry.graph is None:
                entry.graph, entry.difference = self._capture(point, entry.prepared, warmups)
            replay = entry.graph if mode == "graph" else entry.prepared.run
            warm_up(self._device, replay, max(warmups, 1))
            self._check_finite(point, entry.prepared)
            times = timed_replays(self._device, replay, replays)
        return {
            **asdict(times),
            "num_operators": entry.prepared.num_operators,
            "output_difference": entry.difference if mode == "graph" else None,
        }

    def check_fits(self, points: Iterable[PassPoint]) -> None:
        """Raises WorkerError for a point that does not fit into memory by itself; nothing is allocated."""
        self._entries.clear()
        for point in points:
            self._make_room(point)

    def _entry(self, point: PassPoint) -> _Entry:
        if point not in self._entries:
            self._make_room(point)
            self._entries[point] = _Entry(self._maker.make(point))
        self._entries.move_to_end(point)
        return self._entries[point]

    def _make_room(self, point: PassPoint) -> None:
        """Drop the passes that were not used for longest until this one fits; refused is one that never will."""
        need = self._maker.need(point)
        while need.total_bytes > (free_bytes := self._maker.free_bytes()):
            if not self._entries:
                raise WorkerError(
                    "memory",
                    f"{point} of {self._maker.name}: keys and values need {need.cache_bytes / GIB:.2f} GiB and "
                    f"buffers {need.buffer_bytes / GIB:.2f} GiB, and {free_bytes / GIB:.2f} GiB are free beside "
                    "the weights; choose a smaller batch size, fewer tokens, a smaller model or a dtype of 2 bytes",
                )
            self._entries.popitem(last=False)

    def _capture(self, point: PassPoint, prepared: PreparedPass, warmups: int) -> tuple[Work, float]:
        """The graph of a pass, and how far its outputs are from the eager ones."""
        warm_up(self._device, prepared.run, 1)
        eager = prepared.outputs()
        graph = self._graph(point, prepared, warmups)
        warm_up(self._device, graph, 1)
        difference = prepared.difference(eager)
        if not difference <= prepared.tolerance:  # not finite included
            raise WorkerError(
                "outputs",
                f"{point} of {self._maker.name}: the outputs of graph and eager differ by {difference:.3g} of the "
                f"largest, and rounding explains {prepared.tolerance:.3g}; do not measure mode graph with this "
                "version of torch; name another with --python",
            )
        return graph, difference

    def _graph(self, point: PassPoint, prepared: PreparedPass, warmups: int) -> Work:
        try:
            return captured(self._device, prepared.run, warmups)
        except RuntimeError as error:
            if _is_out_of_memory(error):
                raise
            raise WorkerError(
                "capture",
                f"{point} of {self._maker.name}: the capture of its graph failed ({_first_line(error)}); measure "
                "mode eager alone, or name an interpreter with another version of torch with --python",
            ) from error

    def _check_finite(self, point: PassPoint, prepared: PreparedPass) -> None:
        if not prepared.difference(prepared.outputs()) <= 0:
            raise WorkerError(
                "outputs",
                f"{point} of {self._maker.name}: outputs are not finite, so that its times mean nothing; choose "
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
                f"{point} of {self._maker.name}: memory ran out ({_first_line(error)}); choose a smaller batch "
                "size or fewer tokens, or end the programs that hold memory of the device",
            ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of torch's allocators and of the system's."""
    return isinstance(error, MemoryError) or (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
