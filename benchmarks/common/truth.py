"""Runs the paced server beside a load generator, and holds what that saw against what the server did."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.paced_server import Truth

ROOT = Path(__file__).parents[2]
STOP_S = 10.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a load generator tells of it; what it does not tell is None.

    Durations, in nanoseconds, because not every tool says on which clock its times are.
    """

    request_id: str
    ttft_ns: float | None = None
    itl_ns: tuple[float, ...] | None = None
    """Gaps between the events that carried output."""
    tpot_ns: float | None = None
    """(last - first token) / (tokens - 1)."""
    output_tokens: int | None = None
    num_bound: int | None = None
    """Events of which the tool itself says that their time is only an upper bound."""
    scheduled_ns: int | None = None
    sent_ns: int | None = None


@dataclass(frozen=True, slots=True)
class PacedRun:
    """A running server; its truth is whole once it has stopped."""

    url: str
    truth: Path
    stats: dict[str, Any]
    """What the server says of itself; filled in when it has stopped."""

    def requests(self) -> list[Truth]:
        return [msgspec.json.decode(line, type=Truth) for line in self.truth.read_bytes().splitlines()]


def usable_cores() -> tuple[list[int], list[int]]:
    """Cores for the server, and for the tool: apart, unless there is but one."""
    cores = sorted(os.sched_getaffinity(0))
    return ([cores[-1]], cores[:-1]) if len(cores) > 1 else (cores, cores)


def on_cores(argv: Sequence[str], cores: Sequence[int]) -> list[str]:
    """The command, kept on these cores."""
    return ["taskset", "--cpu-list", ",".join(map(str, cores)), *argv]


@contextmanager
def paced_server(directory: Path, flags: Iterable[str] = ()) -> Iterator[PacedRun]:
    """A fresh server on a core of its own that appends to ``directory/truth.jsonl``."""
    directory.mkdir(parents=True, exist_ok=True)
    truth = directory / "truth.jsonl"
    argv = [sys.executable, "-m", "benchmarks.common.paced_server", "--truth", str(truth.resolve()), *flags]
    stats: dict[str, Any] = {}
    with subprocess.Popen(
        on_cores(argv, usable_cores()[0]), stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said.startswith("listening on "):
                raise SystemExit(f"the paced server does not start: {said or 'see above'}")
            yield PacedRun(f"http://127.0.0.1:{said.split()[-1]}", truth, stats)
        finally:
            process.terminate()
            try:
                last_words = process.communicate(timeout=STOP_S)[0].splitlines()
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    stats.update(json.loads(last_words[-1]))


def arrivals_ns(truth: Truth) -> list[int]:
    """When each event with output was sent: those of one send at the same time."""
    pairs = zip(truth.sends_ns, truth.send_events, strict=True)
    return [sent_ns for sent_ns, num_events in pairs for _ in range(num_events)]


@dataclass(frozen=True, slots=True)
class Errors:
    """What a load generator said less what the server did, in ns, over all requests that both know.

    An error of an event is that of the gap before it. ``num_itl_missing`` counts requests whose tool saw another
    number of events, or tells none, so that their gaps have no counterpart.
    """

    ttft_ns: list[float]
    itl_ns: list[float]
    tpot_ns: list[float]
    num_matched: int
    num_unknown: int
    """Requests that the tool tells of and the server does not know by that name."""
    num_wrong_tokens: int | None
    """Requests with another number of tokens; None where the tool counts none."""
    num_itl_missing: int
    bound_share: float | None


def errors(seen: Sequence[Seen], truths: Iterable[Truth]) -> Errors:
    """Matches by request id: the header's where the tool sends one, else the digest of the prompt."""
    true = {
        name: truth for truth in truths for name in (truth.prompt_digest, truth.request_id) if truth.is_complete
    }
    pairs = [(request, true[request.request_id]) for request in seen if request.request_id in true]
    gaps = [(request, true_gaps(truth)) for request, truth in pairs]
    known = [
        (request, gap) for request, gap in gaps if request.itl_ns is not None and len(request.itl_ns) == len(gap)
    ]
    wrong = [said.output_tokens != sum(was.event_tokens) for said, was in pairs if said.output_tokens is not None]
    bounds = [request.num_bound for request, _ in pairs if request.num_bound is not None]
    num_events = sum(len(gap) + 1 for request, gap in gaps if request.num_bound is not None)
    return Errors(
        ttft_ns=[
            request.ttft_ns - (truth.sends_ns[0] - truth.arrived_ns)
            for request, truth in pairs
            if request.ttft_ns is not None
        ],
        itl_ns=[said - was for request, gap in known for said, was in zip(request.itl_ns or (), gap, strict=True)],
        tpot_ns=[
            request.tpot_ns - (truth.sends_ns[-1] - truth.sends_ns[0]) / (sum(truth.event_tokens) - 1)
            for request, truth in pairs
            if request.tpot_ns is not None
        ],
        num_matched=len(pairs),
        num_unknown=len(seen) - len(pairs),
        num_wrong_tokens=sum(wrong) if len(wrong) == len(pairs) else None,
        num_itl_missing=len(pairs) - len(known),
        bound_share=sum(bounds) / num_events if bounds else None,
    )


def true_gaps(truth: Truth) -> list[int]:
    arrivals = arrivals_ns(truth)
    return [later - earlier for earlier, later in pairwise(arrivals)]
