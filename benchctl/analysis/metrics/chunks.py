"""The chunks of many requests as columns: durations, reads and gaps of all of them without a loop over tokens."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from benchctl.analysis.metrics.latency import choice_tokens, is_completed, known_values
from benchctl.records.columns import Integers
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

    def answers(self, t_ns: Integers) -> list["Answer"]:
        """The times of each request's answer, with chunks that arrived at ``t_ns``."""
        of_request: list[list[tuple[int, int, int]]] = [[] for _ in self.requests]
        ends_ns = t_ns[self.starts].tolist(), t_ns[self.starts + self.sizes - 1].tolist()
        for i, choice, *times in zip(self.request_of.tolist(), self.choices, *ends_ns, strict=True):
            of_request[i].append((*times, choice_tokens(self.requests[i], choice) or 0))
        return [
            Answer(
                request.sent_ns,
                min((first_ns for first_ns, _, _ in own), default=None),
                request.done_ns
                if request.stamps == "whole"
                else max((last_ns for _, last_ns, _ in own), default=None),
                tuple((last_ns - first_ns) / (tokens - 1) for first_ns, last_ns, tokens in own if tokens > 1),
            )
            for request, own in zip(self.requests, of_request, strict=True)
        ]

    def latencies_ns(self, t_ns: Integers) -> dict[str, Sequence[float]]:
        """All durations, pooled by latency, with chunks that arrived at ``t_ns``."""
        answers = self.answers(t_ns)
        return {
            "ttft": array("q", known_values(answer.ttft_ns for answer in answers)),
            "tpot": array("d", chain.from_iterable(answer.tpots_ns for answer in answers)),
            "itl": array("q", self.gaps_ns(t_ns, t_ns).tobytes()),
            "e2el": array("q", known_values(answer.e2el_ns for answer in answers)),
        }


class Answer(NamedTuple):
    """The times of the answer to one request, by vLLM's definitions, on the client's clock."""

    sent_ns: int | None
    first_ns: int | None
    """Arrival of the first output of any choice, whatever its kind."""
    last_ns: int | None
    """Arrival of the last output of any choice."""
    tpots_ns: tuple[float, ...]
    """Time per output token of each choice: (last - first output) / (output tokens - 1); a choice of one token, or
    of an unknown number of tokens, has none."""

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
    pairs = [(i, choice) for i, request in enumerate(requests) for choice in request.choices if choice.chunk_ns]
    choices = [choice for _, choice in pairs]
    times_ns = [np.asarray(choice.chunk_ns, np.int64) for choice in choices]
    ends = np.cumsum([0, *map(len, times_ns)])
    t_ns = np.concatenate([np.empty(0, np.int64), *times_ns])
    return Chunks(requests, choices, np.array([i for i, _ in pairs], np.int64), ends[:-1], t_ns)


def answers_of(requests: Sequence[RequestRecord]) -> list[Answer]:
    """The times of the answer to each request."""
    chunks = chunks_of(requests)
    return chunks.answers(chunks.t_ns)


def latencies_ns(requests: Sequence[RequestRecord]) -> dict[str, Sequence[float]]:
    """All durations of these requests, pooled by latency."""
    chunks = chunks_of(requests)
    return chunks.latencies_ns(chunks.t_ns)
