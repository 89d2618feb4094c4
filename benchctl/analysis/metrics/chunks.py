"""The chunks of many requests as columns: durations, reads and gaps of all of them without a loop over tokens."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchctl.analysis.metrics.latency import choice_tokens, is_completed
from benchctl.records.columns import Floats, Integers
from benchctl.records.record import ChoiceRecord, RequestRecord

UNKNOWN_NS = -1
"""Stands for a time that a request or chunk does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of ``requests``, one choice after the other; choices without chunks are left out."""

    requests: Sequence[RequestRecord]
    choices: Sequence[ChoiceRecord]
    request_of: Integers
    """The position of each choice's request in ``requests``."""
    starts: Integers
    """The number of the first chunk of each choice."""
    t_ns: Integers
    """Arrival of each chunk."""

    @property
    def completed(self) -> "Chunks":
        """Those of the requests that were answered completely without an error."""
        completed = [request for request in self.requests if is_completed(request)]
        return self if len(completed) == len(self.requests) else chunks_of(completed)

    @property
    def sizes(self) -> Integers:
        """Number of chunks of each choice."""
        return np.diff(self.starts, append=len(self.t_ns))

    @property
    def sent_ns(self) -> Integers:
        """The send of each request."""
        sends = (UNKNOWN_NS if request.sent_ns is None else request.sent_ns for request in self.requests)
        return np.fromiter(sends, np.int64, len(self.requests))

    @property
    def late_ns(self) -> Integers:
        """Time from the arrival of each chunk until it was read."""
        late_ns = np.full(len(self.t_ns), UNKNOWN_NS)
        for start, choice in zip(self.starts.tolist(), self.choices, strict=True):
            if choice.chunk_late_ns:
                late_ns[start : start + len(choice.chunk_late_ns)] = choice.chunk_late_ns
        return late_ns

    def of_gaps(self, values: Integers) -> Integers:
        """Of one value for each chunk those of the chunks that follow another one of their choice."""
        has_gap = np.ones(len(values), np.bool_)
        has_gap[self.starts] = False
        return values[has_gap]

    @property
    def requests_of_gaps(self) -> Integers:
        """The position of the request of each gap."""
        return self.of_gaps(np.repeat(self.request_of, self.sizes))

    def gaps_ns(self, t_ns: Integers, before_ns: Integers) -> Integers:
        """Time of each chunk in ``t_ns`` since the chunk before it in ``before_ns``, but for first chunks."""
        gaps_ns = t_ns.copy()
        gaps_ns[1:] -= before_ns[:-1]
        return self.of_gaps(gaps_ns)

    @property
    def gaps_of_requests(self) -> list[Integers]:
        """The gaps of each request, one choice after the other."""
        ends = np.bincount(self.requests_of_gaps, minlength=len(self.requests)).cumsum()
        return np.split(self.gaps_ns(self.t_ns, self.t_ns), ends[:-1]) if len(ends) else []

    @property
    def num_simultaneous(self) -> int:
        """Chunks that have the time of the chunk before."""
        return int((self.gaps_ns(self.t_ns, self.t_ns) == 0).sum())

    def outputs_ns(self, t_ns: Integers) -> tuple[Integers, Integers]:
        """First and last output of each request, with chunks that arrived at ``t_ns``."""
        of_request = np.flatnonzero(np.diff(self.request_of, prepend=-1))
        first_ns = np.full(len(self.requests), UNKNOWN_NS)
        last_ns = first_ns.copy()
        if len(of_request):
            answered = self.request_of[of_request]
            first_ns[answered] = np.minimum.reduceat(t_ns[self.starts], of_request)
            last_ns[answered] = np.maximum.reduceat(t_ns[self.starts + self.sizes - 1], of_request)
        for i, request in enumerate(self.requests):
            if request.stamps == "whole":
                last_ns[i] = UNKNOWN_NS if request.done_ns is None else request.done_ns
        return first_ns, last_ns

    def tpots_ns(self, t_ns: Integers) -> tuple[Floats, Integers]:
        """Time per output token of each choice, (last - first output) / (output tokens - 1), and the position of
        its request; without choices of one token, or of an unknown number of tokens.
        """
        owners = map(self.requests.__getitem__, self.request_of.tolist())
        tokens = np.array([choice_tokens(*pair) or 0 for pair in zip(owners, self.choices, strict=True)], np.int64)
        has_pace = tokens > 1
        spans_ns = t_ns[self.starts + self.sizes - 1] - t_ns[self.starts]
        return spans_ns[has_pace] / (tokens[has_pace] - 1), self.request_of[has_pace]

    def latencies_ns(self, t_ns: Integers) -> dict[str, Sequence[float]]:
        """All durations, pooled by latency, with chunks that arrived at ``t_ns``."""
        (first_ns, last_ns), sent_ns = self.outputs_ns(t_ns), self.sent_ns
        return {
            "ttft": _packed((first_ns - sent_ns)[(first_ns >= 0) & (sent_ns >= 0)]),
            "tpot": _packed(self.tpots_ns(t_ns)[0]),
            "itl": _packed(self.gaps_ns(t_ns, t_ns)),
            "e2el": _packed((last_ns - sent_ns)[(last_ns >= 0) & (sent_ns >= 0)]),
        }

    @property
    def answers(self) -> list["Answer"]:
        """The times of the answer to each request."""
        tpots_ns: list[list[float]] = [[] for _ in self.requests]
        for tpot_ns, i in zip(*(column.tolist() for column in self.tpots_ns(self.t_ns)), strict=True):
            tpots_ns[i].append(tpot_ns)
        outputs_ns = (
            [None if t_ns == UNKNOWN_NS else t_ns for t_ns in column.tolist()]
            for column in self.outputs_ns(self.t_ns)
        )
        return list(map(Answer, (request.sent_ns for request in self.requests), *outputs_ns, tpots_ns))


class Answer(NamedTuple):
    """The times of the answer to one request, by vLLM's definitions, on the client's clock."""

    sent_ns: int | None
    first_ns: int | None
    """Arrival of the first output of any choice, whatever its kind."""
    last_ns: int | None
    """Arrival of the last output of any choice."""
    tpots_ns: Sequence[float]
    """Time per output token of each choice of several tokens."""

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token: first output minus send."""
        return None if self.first_ns is None or self.sent_ns is None else self.first_ns - self.sent_ns

    @property
    def e2el_ns(self) -> int | None:
        """End-to-end latency: last output minus send."""
        return None if self.last_ns is None or self.sent_ns is None else self.last_ns - self.sent_ns


def chunks_of(requests: Sequence[RequestRecord]) -> Chunks:
    """The chunks of all choices of ``requests``."""
    t_ns, starts, request_of = array("q"), array("q"), array("q")
    choices: list[ChoiceRecord] = []
    for i, request in enumerate(requests):
        for choice in request.choices:
            if choice.chunk_ns:
                choices.append(choice)
                request_of.append(i)
                starts.append(len(t_ns))
                t_ns.extend(choice.chunk_ns)
    return Chunks(requests, choices, *(np.array(column, np.int64) for column in (request_of, starts, t_ns)))


def latencies_ns(requests: Sequence[RequestRecord]) -> dict[str, Sequence[float]]:
    """All durations of these requests, pooled by latency."""
    chunks = chunks_of(requests)
    return chunks.latencies_ns(chunks.t_ns)


def _packed(values: Integers | Floats) -> Sequence[float]:
    """The values in 64 bits each, as Python's own numbers."""
    return array(values.dtype.kind.replace("i", "q").replace("f", "d"), values.tobytes())
