"""Neighbours as their parent sees them: started on their slots, awaited until they load, and ended for certain."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchctl.analysis.validity.noise import NEIGHBOUR_LOST
from benchctl.cluster.neighbours.neighbour import LOADING, NeighbourReport
from benchctl.cluster.slots import Slot
from benchctl.errors import RunError
from benchctl.measure.server import process as processes
from benchctl.measure.server.cores import thread_on
from benchctl.measure.telemetry.visible_devices import VARIABLE
from benchctl.profile.model import Timeouts
from benchctl.untrusted.reading import DECODING_ERRORS

_MODULE: Final = "benchctl.cluster.neighbours.neighbour"
_WARMUP_S: Final = 600.0
"""Time for the warm-up and the first answer, beyond the time that a server may take to start."""
_END_S: Final = 10.0
"""Time for a neighbour to end, beyond the time that its server may take to stop."""
_KILL_S: Final = 2.0
_MOST_OUTPUT: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourPlan:
    """The neighbours of a run: the load that they serve, and their slots."""

    results: Path
    """Result directory whose baseline and request set they serve."""
    slots: tuple[Slot, ...]
    """One for each neighbour."""
    logs: Path
    """Folder of the logs of their servers."""
    name: str
    """Beginning of the names of these logs."""
    timeouts: Timeouts


class _Child:
    """One neighbour. ``start`` it inside ``thread_on`` of its cores."""

    def __init__(self, plan: NeighbourPlan, slot: Slot) -> None:
        self.slot = slot
        self.log = plan.logs / f"{plan.name}-slot-{slot.index}.log"
        env = {**os.environ, VARIABLE: ",".join(slot.gpus)}
        argv = (sys.executable, "-m", _MODULE, str(plan.results.resolve()), str(self.log.resolve()))
        errors = plan.logs / f"{plan.name}-slot-{slot.index}.errors.log"
        with thread_on(frozenset(slot.cores) or None):
            self.process = processes.start_piped(argv, env, errors)
        self._errors = errors
        self._tree = processes.ProcessTree(self.process)
        self._output = b""
        self._has_ended = False

    @property
    def descriptor(self) -> int:
        return -1 if self.process.stdout is None else self.process.stdout.fileno()

    @property
    def is_loading(self) -> bool:
        return LOADING.encode() in self._output.splitlines()

    def read(self) -> bool:
        """Take what it has printed; False at the end of its output."""
        piece = os.read(self.descriptor, 1 << 16)
        self._output = (self._output + piece)[:_MOST_OUTPUT]
        return bool(piece)

    def lost_text(self) -> str:
        """The reason why it has ended."""
        report = self.report()
        reason = report.problem if report is not None and report.problem else self._last_words()
        return f"the neighbour on slot {self.slot.index} ended ({reason}); the log of its server: {self.log}"

    def report(self) -> NeighbourReport | None:
        """Its last line; None where it left none."""
        for line in reversed(self._output.splitlines()):
            with suppress(*DECODING_ERRORS):
                return msgspec.json.decode(line, type=NeighbourReport)
        return None

    def has_exited(self) -> bool:
        return self.process.poll() is not None

    def ask_to_end(self) -> None:
        """Close its input, which is its sign to end."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def end(self, deadline_s: float) -> None:
        """Wait for its end until the moment ``deadline_s``, then end all that is left of it."""
        if self._has_ended:
            return
        self._has_ended = True
        with selectors.DefaultSelector() as selector:
            selector.register(self.descriptor, selectors.EVENT_READ)
            while (left_s := deadline_s - time.monotonic()) > 0:
                if selector.select(left_s) and not self.read():
                    break
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        self._tree.stop(_KILL_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        with suppress(OSError):
            if self._errors.stat().st_size == 0:
                self._errors.unlink()

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self._errors.read_bytes()[-4096:].decode(errors="replace").splitlines()
            if lines:
                return lines[-1]
        return f"exit code {self.process.poll()}"


class Neighbours:
    """The neighbours of one run, which load while it is measured."""

    def __init__(self, children: Sequence[_Child], timeouts: Timeouts) -> None:
        self._children = children
        self._timeouts = timeouts

    def end(self) -> tuple[str, ...]:
        """End them all; returns, for each that had not loaded until now, or whose requests failed, why."""
        early = [child for child in self._children if child.has_exited()]
        for child in self._children:
            child.ask_to_end()
        deadline_s = time.monotonic() + self._timeouts.stop_s + _END_S
        for child in self._children:
            child.end(deadline_s)
        problems = [child.lost_text() for child in early]
        for child in self._children:
            report = child.report()
            if child not in early and report is not None and report.num_failed:
                failed = f"{report.num_failed} of {report.num_sent} requests"
                problems.append(f"{failed} to the neighbour on slot {child.slot.index} failed: see {child.log}")
        return tuple(problems)

    def wait_until_loading(self) -> None:
        """Return when each of them answers its load.

        Raises RunError with cause ``neighbours-lost`` for one that ended before, or whose time is up.
        """
        deadline_s = time.monotonic() + self._timeouts.ready_s + _WARMUP_S
        with selectors.DefaultSelector() as selector:
            waiting = {child.descriptor: child for child in self._children}
            for descriptor in waiting:
                selector.register(descriptor, selectors.EVENT_READ)
            while waiting:
                events = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not events:
                    child = next(iter(waiting.values()))
                    raise _lost(
                        f"the neighbour on slot {child.slot.index} does not come to its load; see {child.log}"
                    )
                for key, _ in events:
                    child = waiting[key.fd]
                    if not child.read():
                        child.process.wait()
                        raise _lost(child.lost_text())
                    if child.is_loading:
                        selector.unregister(key.fd)
                        del waiting[key.fd]


@contextmanager
def neighbours_loading(plan: NeighbourPlan) -> Iterator[Neighbours]:
    """Neighbours on the slots of ``plan``, which load inside the context; nothing of them is left after it.

    Raises RunError with cause ``neighbours-lost`` where one cannot be brought to load.
    """
    plan.logs.mkdir(exist_ok=True)
    children: list[_Child] = []
    with ExitStack() as stack:
        neighbours = Neighbours(children, plan.timeouts)
        stack.callback(neighbours.end)
        for slot in plan.slots:
            try:
                children.append(_Child(plan, slot))
            except OSError as error:
                raise _lost(f"the neighbour on slot {slot.index} cannot be started ({error.strerror})") from error
        neighbours.wait_until_loading()
        yield neighbours


def _lost(message: str) -> RunError:
    return RunError(message, cause=NEIGHBOUR_LOST)
