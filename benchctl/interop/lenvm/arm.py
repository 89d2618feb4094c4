"""One arm of a LenVM timing directory in memory: its requests, its answers and its server's log."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from benchctl.errors import InvalidDataError
from benchctl.guided.parameter_table import CONSTRAINT_SIGNS, LENGTH_MODES, PARAMETERS, SERVER_MODE, SERVER_SCALE
from benchctl.interop.lenvm.files import BASELINE, ArmFiles, Meta, read_meta
from benchctl.interop.lenvm.responses import Responses, read_responses
from benchctl.interop.readers.lenvm_averages import Averages, read_averages
from benchctl.interop.readers.lenvm_timing import (
    TimingLog,
    TimingRecord,
    last_lives,
    num_start_up,
    read_timing,
    revisions_of,
)
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.reading import UnreadableError, read_lines

_MOST_SETTING: Final = 1 << 32
_SAMPLING: Final = {"temperature": "--temperature", "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p"}


@dataclass(frozen=True, kw_only=True)
class ArmData:
    """The content of the files of one tag."""

    files: ArmFiles
    meta: Meta
    responses: Responses
    timing: TimingLog
    averages: tuple[Averages, ...]
    log_lines: tuple[str, ...]

    @property
    def tag(self) -> str:
        return self.files.tag

    @property
    def is_baseline(self) -> bool:
        return self.tag == BASELINE

    @cached_property
    def output_tokens(self) -> int | None:
        """Output tokens of all questions, each counted once; None if one of those answered has no count."""
        counts = [answered.completion_tokens for answered in self.responses.answered if answered.error is None]
        return sum(count for count in counts if count is not None) if counts and None not in counts else None

    @cached_property
    def lives(self) -> Sequence[Sequence[TimingRecord]]:
        """The lives of the server that answered, without those before it."""
        return last_lives(self.timing, self.output_tokens)

    @property
    def is_greedy(self) -> bool:
        return self.sampling.get("top_k") == 1 or self.sampling.get("temperature") == 0

    def num_start_up(self, life: Sequence[TimingRecord]) -> int:
        """Number of records at the beginning of a life that do not answer the client."""
        return num_start_up(life, is_greedy_run=self.is_greedy)

    @cached_property
    def body(self) -> Mapping[str, Any]:
        """The body of a request; those of all requests of a run are alike."""
        return next((answered.body for answered in self.responses.answered if answered.body), {})

    @cached_property
    def sampling(self) -> dict[str, float]:
        """Sampling parameters that are on record: in the requests, in the meta file, or on the command line."""
        sampling: dict[str, float] = {}
        for name, flag in _SAMPLING.items():
            values = [self.body.get(name), self.meta.top_k if name == "top_k" else None, self.meta.argument(flag)]
            value = next((number for value in values if (number := _number(value)) is not None), None)
            if value is not None:
                sampling[name] = int(value) if name == "top_k" else value
        return sampling

    @property
    def unrecorded_sampling(self) -> tuple[str, ...]:
        return tuple(name for name in _SAMPLING if name not in self.sampling)

    @cached_property
    def guidance(self) -> dict[str, Any] | None:
        """Guidance by the names of a profile; None if no key activates it."""
        params = self.body.get("custom_params")
        if not isinstance(params, dict):
            meta = self.meta
            fields = {"value_scale": meta.value_scale, "mode": meta.value_mode, "gamma": meta.value_gamma}
            params = {} if self.body else {name: value for name, value in fields.items() if value is not None}
        guidance = {
            name: next(params[key] for key in parameter.keys if key in params)
            for name, parameter in PARAMETERS.items()
            if parameter.is_in_profiles and any(key in params for key in parameter.keys)
        }
        if not any(PARAMETERS[name].activates for name in guidance):
            return None
        if "value_constraint" in guidance:
            sign = guidance["value_constraint"]
            guidance["value_constraint"] = CONSTRAINT_SIGNS.get(sign, sign)
        if "target_length_mode" in guidance:
            guidance["target_length_mode"] = LENGTH_MODES.get(guidance["target_length_mode"], "remaining")
        numbers = {name: float(value) for name, value in guidance.items() if type(value) in {int, float}}
        return {"mode": SERVER_MODE, "value_scale": SERVER_SCALE, **guidance, **numbers}

    @property
    def concurrency(self) -> int:
        """Requests open at the same time; all of them if that was not recorded."""
        return self.meta.max_concurrency or max(1, len(self.responses.answered))

    @cached_property
    def durations_s(self) -> tuple[float, ...]:
        """Duration of each question, in their order."""
        return tuple(answered.elapsed_s or 0.0 for answered in self.responses.answered)

    @cached_property
    def makespan_s(self) -> float:
        """Time from the first send to the last answer, by the durations."""
        return makespan_s(self.durations_s, self.concurrency)

    @property
    def resumed(self) -> str | None:
        """The evidence that some answers are of another run than the wall clock; None without any."""
        num_repeated = sum(answered.num_attempts > 1 for answered in self.responses.answered)
        if num_repeated:
            return f"{num_repeated} questions have lines of several attempts"
        wall_s = self.meta.wall_clock_s
        if wall_s is not None and self.makespan_s > wall_s:
            return f"the answers took {self.makespan_s:.2f} s together and the wall clock says {wall_s:.2f} s"
        return None

    @property
    def revisions(self) -> tuple[str, ...]:
        """Revisions that fit the server's output; empty without any output."""
        if not self.timing.records and not self.averages:
            return ()
        return revisions_of((record for life in self.lives for record in life), self.log_lines)


def read_arm(files: ArmFiles) -> ArmData:
    """Read the files of one tag as far as possible. Raises InvalidDataError for a damaged meta file."""
    log = [line.decode(errors="replace").rstrip("\r\n") for line in lines_of(files.server_log)]
    return ArmData(
        files=files,
        meta=read_meta(files.meta),
        responses=read_responses(lines_of(files.responses)),
        timing=read_timing(lines_of(files.timing)),
        averages=read_averages(log),
        log_lines=tuple(log),
    )


def lines_of(path: Path | None) -> Iterator[bytes]:
    """The lines of a file with their ends; none without a file. Raises InvalidDataError where it cannot be read."""
    if path is None:
        return
    try:
        yield from (line for _, line in read_lines(path, ROWS_BYTES))
    except UnreadableError as error:
        raise InvalidDataError(f"{error}; copy it again, or remove it") from error


def whole_number(value: object) -> int | None:
    """A positive whole number that a setting can have; None for anything else."""
    return value if type(value) is int and 0 < value <= _MOST_SETTING else None


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, str) or type(value) in {int, float} else None  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) <= _MOST_SETTING else None


def sends_s(durations_s: Sequence[float], concurrency: int) -> tuple[float, ...]:
    """Seconds from the first send to each send, in the order of the queue.

    The LenVM client records no times, only durations. It is a closed loop: each of ``concurrency`` workers takes
    the next question as soon as it is free, so durations determine all times but the first.
    """
    free_at_s = [0.0] * max(1, min(concurrency, len(durations_s)))
    sends = []
    for duration_s in durations_s:
        send_s = heapq.heappop(free_at_s)
        sends.append(send_s)
        heapq.heappush(free_at_s, send_s + duration_s)
    return tuple(sends)


def makespan_s(durations_s: Sequence[float], concurrency: int) -> float:
    """Seconds from the first send to the last answer."""
    sends = sends_s(durations_s, concurrency)
    return max((start + duration for start, duration in zip(sends, durations_s, strict=True)), default=0.0)
