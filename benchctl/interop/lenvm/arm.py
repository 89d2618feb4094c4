"""One arm of a LenVM timing directory in memory: what it was asked, what it answered, what its server logged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from benchctl.guided.parameter_table import CONSTRAINT_SIGNS, LENGTH_MODES, PARAMETERS, SERVER_MODE, SERVER_SCALE
from benchctl.interop.lenvm.files import BASELINE, ArmFiles, Meta, read_meta
from benchctl.interop.lenvm.responses import Responses, read_responses
from benchctl.interop.lenvm.schedule import makespan_s
from benchctl.interop.readers.lenvm_averages import Averages, read_averages
from benchctl.interop.readers.lenvm_revision import revisions_of
from benchctl.interop.readers.lenvm_timing import TimingLog, TimingRecord, last_lives, num_start_up, read_timing

_NO_RESPONSES: Final = Responses(answered=(), num_rows=0, row_latencies_s=())
_NO_TIMING: Final = TimingLog(lives=())
_SAMPLING: Final = {"temperature": "--temperature", "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p"}


@dataclass(frozen=True, kw_only=True)
class ArmData:
    """Everything that the files of one tag hold."""

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
        """Of all questions, each counted once; None where one that was answered does not tell."""
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
        """Records at the beginning of a life that are no answers to the client."""
        return num_start_up(life, is_greedy_run=self.is_greedy)

    @cached_property
    def body(self) -> Mapping[str, Any]:
        """What a request asked for; all of a run ask alike."""
        return next((answered.body for answered in self.responses.answered if answered.body), {})

    @cached_property
    def sampling(self) -> dict[str, float]:
        """Sampling parameters that are on record: in the requests, in the meta file, or on the command line."""
        found: dict[str, float] = {}
        for name, flag in _SAMPLING.items():
            told = [self.body.get(name), self.meta.top_k if name == "top_k" else None, self.meta.argument(flag)]
            value = next((number for value in told if (number := _number(value)) is not None), None)
            if value is not None:
                found[name] = int(value) if name == "top_k" else value
        return found

    @property
    def unrecorded_sampling(self) -> tuple[str, ...]:
        return tuple(name for name in _SAMPLING if name not in self.sampling)

    @cached_property
    def guidance(self) -> dict[str, Any] | None:
        """Guidance by the names of a profile; None where no key activated any."""
        params = self.body.get("custom_params")
        if not isinstance(params, dict):
            meta = self.meta
            told = {"value_scale": meta.value_scale, "mode": meta.value_mode, "gamma": meta.value_gamma}
            params = {} if self.body else {name: value for name, value in told.items() if value is not None}
        found = {
            name: next(params[key] for key in parameter.keys if key in params)
            for name, parameter in PARAMETERS.items()
            if parameter.is_in_profiles and any(key in params for key in parameter.keys)
        }
        if not any(PARAMETERS[name].activates for name in found):
            return None
        if "value_constraint" in found:
            found["value_constraint"] = CONSTRAINT_SIGNS.get(found["value_constraint"], found["value_constraint"])
        if "target_length_mode" in found:
            found["target_length_mode"] = LENGTH_MODES.get(found["target_length_mode"], "remaining")
        numbers = {name: float(value) for name, value in found.items() if type(value) in {int, float}}
        return {"mode": SERVER_MODE, "value_scale": SERVER_SCALE, **found, **numbers}

    @property
    def concurrency(self) -> int:
        """Requests open at the same time; all of them where that is not on record."""
        return self.meta.max_concurrency or max(1, len(self.responses.answered))

    @cached_property
    def durations_s(self) -> tuple[float, ...]:
        """How long each question took, in their order."""
        return tuple(answered.elapsed_s or 0.0 for answered in self.responses.answered)

    @cached_property
    def makespan_s(self) -> float:
        """From the first send to the last answer, as the durations have it."""
        return makespan_s(self.durations_s, self.concurrency)

    @property
    def resumed(self) -> str | None:
        """Why some answers must be of another run than the wall clock; None where nothing says so."""
        again = sum(answered.num_attempts > 1 for answered in self.responses.answered)
        if again:
            return f"{again} questions have lines of several attempts"
        wall_s = self.meta.wall_clock_s
        if wall_s is not None and self.makespan_s > wall_s:
            return f"the answers took {self.makespan_s:.2f} s together and the wall clock says {wall_s:.2f} s"
        return None

    @property
    def revisions(self) -> tuple[str, ...]:
        """Revisions that fit what the server wrote; none where nothing of it is there."""
        if not self.timing.records and not self.averages:
            return ()
        return revisions_of((record for life in self.lives for record in life), self.log_lines)


def read_arm(files: ArmFiles) -> ArmData:
    """Read the files of one tag as far as they can be read. Raises InvalidDataError for a damaged meta file."""
    log = () if files.server_log is None else files.server_log.read_bytes().decode(errors="replace").splitlines()
    return ArmData(
        files=files,
        meta=read_meta(files.meta),
        responses=_NO_RESPONSES
        if files.responses is None
        else read_responses(files.responses.read_bytes().splitlines(keepends=True)),
        timing=_NO_TIMING
        if files.timing is None
        else read_timing(files.timing.read_bytes().splitlines(keepends=True)),
        averages=read_averages(log),
        log_lines=tuple(log),
    )


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if type(value) in {int, float} else None  # type: ignore[arg-type]
