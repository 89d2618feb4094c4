"""A directory of the LenVM timing scripts in memory: the files, answers and step log of each arm."""

import csv
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from benchctl.errors import InvalidDataError, UsageError
from benchctl.guided.params import CONSTRAINT_SIGNS, LENGTH_MODES, PARAMETERS, SERVER_MODE, SERVER_SCALE
from benchctl.interop.lenvm_log import (
    Averages,
    TimingLog,
    TimingRecord,
    last_lives,
    num_start_up,
    read_averages,
    read_timing,
    revisions_of,
)
from benchctl.records.finish_reasons import MOST_WORD_CHARS
from benchctl.records.record import ChoiceRecord
from benchctl.records.schema import GpuSample
from benchctl.units import NS_PER_S
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, decoding_problem, read_bytes, read_lines

BASELINE: Final = "baseline"
_META: Final = ".meta.json"
_TIMING: Final = ".timing.jsonl"
_RESPONSES: Final = ".responses.jsonl"
_NOT_META: Final = (
    "it is not a meta.json of a LenVM timing run: copy it again, or remove it; its own values are then unknown"
)
_SAMPLES: Final = ".gpu_samples.csv"
_LOG: Final = ".log"
_SUFFIXES: Final = (_META, _TIMING, _RESPONSES, _SAMPLES, _LOG)
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 32), le=1 << 32)]
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``<tag>.meta.json`` that are used; None for those that a run did not write.

    ``wall_clock_s`` is that of the client's process, including its start, imports and the loading of the dataset.
    """

    tag: str | None = None
    dataset: str | None = None
    max_questions: _Count | None = None
    n_samples_per_q: _Count | None = None
    max_concurrency: _Count | None = None
    max_tokens: _Count | None = None
    top_k: _Number | None = None
    value_scale: _Finite | None = None
    value_mode: str | None = None
    value_gamma: _Finite | None = None
    wall_clock_s: _Seconds | None = None
    wall_start_epoch_s: _Seconds | None = None
    wall_end_epoch_s: _Seconds | None = None
    responses_path: str | None = None
    cmd: tuple[str, ...] = ()

    def argument(self, flag: str) -> str | None:
        """The word after a flag on the command line of the client."""
        words = list(self.cmd)
        index = words.index(flag) + 1 if flag in words else len(words)
        return words[index] if index < len(words) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFiles:
    """The files of one tag; None for those that do not exist."""

    tag: str
    meta: Path | None
    timing: Path | None
    responses: Path | None
    gpu_samples: Path | None
    server_log: Path | None

    @property
    def paths(self) -> Mapping[str, Path]:
        """Each file that exists, by the name of its copy."""
        by_name = {
            "meta.raw.json": self.meta,
            "steps.raw.jsonl": self.timing,
            "responses.raw.jsonl": self.responses,
            "gpu.raw.csv": self.gpu_samples,
            "server.log": self.server_log,
        }
        return {name: path for name, path in by_name.items() if path is not None}


def find_arms(directory: Path) -> tuple[ArmFiles, ...]:
    """The arms of a directory, the baseline first. Raises UsageError without a baseline."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; name one that the LenVM timing scripts wrote")
    names = _names_in(directory)
    tags = {name.removesuffix(end) for name in names for end in (_META, _TIMING) if name.endswith(end)}
    if BASELINE not in tags:
        raise UsageError(
            f"{directory} has neither {BASELINE}{_META} nor {BASELINE}{_TIMING}; name a directory that the LenVM "
            "timing scripts wrote"
        )
    return tuple(_files_of(directory, tag, names) for tag in sorted(tags, key=lambda tag: (tag != BASELINE, tag)))


def _names_in(directory: Path) -> list[str]:
    """Names of the files, without links: what they lead to would be copied into the results."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}; correct its permissions") from error
    links = [path for path in paths if path.is_symlink()]
    if link := next((path for path in links if path.name.endswith(_SUFFIXES)), None):
        raise UsageError(f"{link} is a link; put a copy of the file in its place")
    return [path.name for path in paths if path not in links]


def _files_of(directory: Path, tag: str, names: Iterable[str]) -> ArmFiles:
    def existing(name: str) -> Path | None:
        return directory / name if name in names else None

    meta = existing(f"{tag}{_META}")
    recorded_path = read_meta(meta).responses_path if meta is not None else None
    answers = existing(Path(recorded_path).name) if recorded_path else None
    if answers is None:  # the path in the meta file is one of the machine that measured
        matches = [
            name for name in names if name.endswith(_RESPONSES) and _is_of(name.removesuffix(_RESPONSES), tag)
        ]
        answers = directory / matches[0] if len(matches) == 1 else None
    logs = [name for name in names if name.endswith(_LOG) and _is_of(name.removesuffix(_LOG), tag)]
    return ArmFiles(
        tag=tag,
        meta=meta,
        timing=existing(f"{tag}{_TIMING}"),
        responses=answers,
        gpu_samples=existing(f"{tag}{_SAMPLES}"),
        server_log=directory / logs[0] if len(logs) == 1 else None,
    )


def _is_of(stem: str, tag: str) -> bool:
    """``gsm8k.baseline_q50_n16`` and ``server.baseline`` are of the tag ``baseline``."""
    return any(part == tag or part.startswith(f"{tag}_q") for part in stem.split("."))


def read_meta(path: Path | None) -> Meta:
    """The meta file of a run; an empty one for None. Raises InvalidDataError when it is damaged."""
    if path is None:
        return Meta()
    try:
        document: Any = msgspec.json.decode(read_bytes(path))
        return msgspec.convert(document, Meta, strict=False)
    except UnreadableError as error:
        raise InvalidDataError(f"{error}; {_NOT_META}") from error
    except DECODING_ERRORS as error:
        raise InvalidDataError(f"{path}: {decoding_problem(error)}; {_NOT_META}") from error


JsonObject = Mapping[str, Any]
_MOST_COUNT: Final = 1 << 53
_DAY_S: Final = 86_400.0
_Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST_COUNT)]


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    idx: _Index
    choice_idx: _Index | None = None
    question: str | None = None
    answer: Any = None
    request: dict[str, Any] = {}
    usage: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None
    text: str | None = None
    error: Any = None
    elapsed_s: Annotated[float, msgspec.Meta(ge=0, le=_DAY_S)] | None = None

    @property
    def is_failure(self) -> bool:
        return self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The outcome of one question; of several attempts the last that was answered, or else the last.

    ``usage`` counts the prompt once and the output of all choices; ``elapsed_s`` includes the client's retries.
    """

    idx: int
    question: str | None
    gold: str | None
    body: JsonObject
    choices: tuple[ChoiceRecord, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    elapsed_s: float | None
    error: str | None
    num_rows: int
    """Lines of this attempt."""
    num_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """All questions in the order of their numbers, and the count of damaged lines."""

    answered: tuple[Answered, ...]
    num_rows: int
    row_latencies_s: tuple[float, ...]
    """Latency of every line that has one, in the order of the file."""
    num_damaged: int = 0
    is_cut: bool = False


def read_responses(lines: Iterable[bytes]) -> Responses:
    """The answers in these lines, given with their line ends. Damaged lines are counted, not raised."""
    decoder = msgspec.json.Decoder(_Row, strict=False)
    rows: list[_Row] = []
    num_damaged, is_cut = 0, False
    for line in lines:
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except DECODING_ERRORS:
            is_cut = not line.endswith(b"\n")
            num_damaged += not is_cut
    by_question: dict[int, list[_Row]] = {}
    for row in rows:
        by_question.setdefault(row.idx, []).append(row)
    return Responses(
        answered=tuple(_answered(idx, of_question) for idx, of_question in sorted(by_question.items())),
        num_rows=len(rows),
        row_latencies_s=tuple(row.elapsed_s for row in rows if row.elapsed_s is not None),
        num_damaged=num_damaged,
        is_cut=is_cut,
    )


def _answered(idx: int, rows: Sequence[_Row]) -> Answered:
    attempts = _attempts(rows)
    last = next((attempt for attempt in reversed(attempts) if not attempt[0].is_failure), attempts[-1])
    first = last[0]
    usage = next((row.usage for row in last if row.usage), {})
    return Answered(
        idx=idx,
        question=first.question,
        gold=None if first.answer is None else str(first.answer),
        body=first.request,
        choices=() if first.is_failure else tuple(_choice(i, row) for i, row in enumerate(last)),
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        completion_tokens=_count(usage, "completion_tokens", "output_tokens"),
        elapsed_s=first.elapsed_s,
        error=_text(first.error) if first.is_failure else None,
        num_rows=len(last),
        num_attempts=len(attempts),
    )


def _attempts(rows: Sequence[_Row]) -> list[list[_Row]]:
    """The lines of a question, split at each failed request and at each repeated choice."""
    attempts: list[list[_Row]] = []
    choices: set[int | None] = set()
    for row in rows:
        if not attempts or row.is_failure or attempts[-1][0].is_failure or row.choice_idx in choices:
            attempts.append([])
            choices = set()
        attempts[-1].append(row)
        choices.add(row.choice_idx)
    return attempts


def _choice(position: int, row: _Row) -> ChoiceRecord:
    reason = (row.choice or {}).get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason  # as SGLang's own API states it
    return ChoiceRecord(
        index=position if row.choice_idx is None else row.choice_idx,
        text=row.text or "",
        finish_reason=reason[:MOST_WORD_CHARS] if isinstance(reason, str) else None,
    )


def _count(usage: JsonObject, *names: str) -> int | None:
    value = next((usage[name] for name in names if usage.get(name) is not None), None)
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else None


def _text(error: object) -> str:
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()


_FORMAT: Final = "%Y/%m/%d %H:%M:%S.%f"
_MIB: Final = 1 << 20
_MOST_S: Final = 1e8
"""Above the duration of a run, and its time zone: three years."""
_MOST_NUMBER: Final = 1e9
"""Above every share in percent and every memory in MiB."""
_ZONE_S: Final = 900
"""Time zones differ by multiples of a quarter of an hour."""


def read_gpu_samples(lines: Iterable[str], *, start_epoch_s: float | None, start_ns: int) -> Iterator[GpuSample]:
    """The samples of a run that began at ``start_epoch_s``, on a clock that was ``start_ns`` then.

    The time zone is the one that puts the first sample next to that moment; if it is unknown, the first sample is
    the moment. Other lines (the header, half a line) are skipped.
    """
    origin_s: float | None = None
    for line in lines:
        sample = _sample(line)
        if sample is None:
            continue
        local_s, index, utilization, memory_mib = sample
        if origin_s is None:
            begin_s = local_s if start_epoch_s is None else start_epoch_s
            origin_s = begin_s + round((local_s - begin_s) / _ZONE_S) * _ZONE_S
        if abs(local_s - origin_s) > _MOST_S:
            continue
        yield GpuSample(
            t_ns=start_ns + round((local_s - origin_s) * NS_PER_S),
            index=index,
            source="nvidia-smi",
            utilization_frac=None if utilization is None else utilization / 100,
            memory_used_bytes=None if memory_mib is None else round(memory_mib * _MIB),
        )


def _sample(line: str) -> tuple[float, int, float | None, float | None] | None:
    try:
        cells = next(csv.reader([line], skipinitialspace=True), [])
        if len(cells) != 4:
            return None
        moment = datetime.strptime(cells[0], _FORMAT).replace(tzinfo=UTC)
        return moment.timestamp(), int(_number(cells[1]) or 0), _number(cells[2]), _number(cells[3])
    except (ValueError, csv.Error):
        return None


def _number(text: str) -> float | None:
    """A number; None for ``[N/A]``, which a device does not report. Raises ValueError for an impossible one."""
    if text.startswith("["):
        return None
    if not 0 <= (number := float(text)) <= _MOST_NUMBER:
        raise ValueError(text)
    return number


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
            value = next((number for value in values if (number := _number_arm(value)) is not None), None)
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


def _number_arm(value: object) -> float | None:
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
