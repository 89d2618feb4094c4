"""One phase of load on a simulated server, request by request: when each was sent, and when each token left."""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from benchctl.records.schema import StepRecord
from benchctl.sim.core import Core
from benchctl.sim.phase import AnnouncedPhase, AnnouncedRequest
from benchctl.sim.scheduling.sequence import Sequence
from benchctl.sim.simulate import SimLoad


@dataclass(frozen=True, slots=True)
class ServedChoice:
    """One choice that has ended; ``token_ns`` holds the time at which each of its tokens left."""

    sequence: Sequence
    token_ns: list[int]
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """A request that has ended, in virtual nanoseconds. ``slot_free_ns`` is None where it waited for no slot."""

    request_id: str
    planned_ns: int
    slot_free_ns: int | None
    end_ns: int
    choices: tuple[ServedChoice, ...]

    @property
    def sent_ns(self) -> int:
        """Time at which a client without any delay sends it: as planned, or when its slot is free."""
        return self.planned_ns if self.slot_free_ns is None else self.slot_free_ns


class _Slots:
    """The planned time of each request of a phase, and the end of an earlier one that gives it its slot."""

    def __init__(self, start_ns: int, arrivals: Items[AnnouncedRequest], limit: int | None) -> None:
        ordered = sorted(arrivals, key=lambda arrival: arrival.arrival_ns)
        self._planned_ns = [start_ns + arrival.arrival_ns for arrival in ordered]
        self._index = {arrival.request_id: i for i, arrival in enumerate(ordered)}
        self._limit = limit
        self._ended_ns: list[int] = []

    def times_of(self, request_id: str) -> tuple[int, int | None]:
        """The planned time of the request, and that at which the slot became free that it waited for."""
        index = self._index[request_id]
        planned_ns = self._planned_ns[index]
        if self._limit is None or index < self._limit:
            return planned_ns, None
        free_ns = self._ended_ns[index - self._limit]
        return planned_ns, free_ns if free_ns > planned_ns else None

    def end(self, end_ns: int) -> None:
        insort(self._ended_ns, end_ns)


def serve(core: Core, load: SimLoad, on_step: Callable[[StepRecord], None]) -> Iterator[ServedRequest]:
    """Serve one phase to its end; yields each request as it ends.

    The steps are those that the server logs when the same phase is announced and sent over HTTP.
    """
    offsets_ns = load.arrival_ns or (0,) * len(load.requests)
    arrivals = [
        AnnouncedRequest(request.request_id, offset_ns)
        for request, offset_ns in zip(load.requests, offsets_ns, strict=True)
    ]
    core.announce(AnnouncedPhase(arrivals, max_concurrency=load.max_concurrency, is_warmup=load.is_warmup))
    slots = _Slots(core.engine.now_ns, arrivals, load.max_concurrency)
    for request in load.requests:
        core.submit(request)
    token_ns: defaultdict[int, list[int]] = defaultdict(list)
    ended: defaultdict[str, list[ServedChoice]] = defaultdict(list)
    while (output := core.next_step()) is not None:
        on_step(output.record)
        now_ns = core.engine.now_ns
        for seq in output.emitted:
            times_ns = token_ns[seq.seq_id]
            times_ns += [now_ns] * (seq.num_output - len(times_ns))
        for seq in output.finished:
            ended[seq.request.request_id].append(ServedChoice(seq, token_ns.pop(seq.seq_id), now_ns))
        for request_id in output.finished_requests:
            planned_ns, free_ns = slots.times_of(request_id)
            slots.end(now_ns)
            choices = sorted(ended.pop(request_id), key=lambda choice: choice.sequence.choice)
            yield ServedRequest(
                request_id=request_id,
                planned_ns=planned_ns,
                slot_free_ns=free_ns,
                end_ns=now_ns,
                choices=tuple(choices),
            )
