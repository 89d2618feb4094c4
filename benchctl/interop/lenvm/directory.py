"""A directory of the LenVM timing scripts in memory: files, answers and step log of each arm.

An arm is a tag such as ``baseline``, with one life of a server or several. Its answers are a line for each choice,
or one for a request that failed. ``usage`` belongs to a request and is copied to each of its choices, so that a
plain sum counts it n times. Lines are appended, also by a client that is started again: a question may have failed
first and been answered later.
"""

import csv
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from benchctl.errors import InvalidDataError, UsageError
from benchctl.guided.params import CONSTRAINT_SIGNS, LENGTH_MODES, PARAMETERS, SERVER_MODE, SERVER_SCALE
from benchctl.interop.lenvm_log import (
    Averages,
    Damage,
    Lives,
    last_lives,
    num_start_up,
    read_averages,
    read_damaged,
    read_timing,
    revisions_of,
)
from benchctl.records.finish_reasons import MOST_WORD_CHARS
from benchctl.records.record import ChoiceRecord
from benchctl.records.schema import GpuSample
from benchctl.units import NS_PER_S
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.files import (
    DECODING_ERRORS,
    UnreadableError,
    decoding_problem,
    read_bytes,
    read_lines,
)

BASELINE: Final = "baseline"
META: Final = "meta.raw.json"
STEPS: Final = "steps.raw.jsonl"
RESPONSES: Final = "responses.raw.jsonl"
GPU: Final = "gpu.raw.csv"
LOG: Final = "server.log"
_SUFFIXES: Final = {
    META: ".meta.json",
    STEPS: ".timing.jsonl",
    RESPONSES: ".responses.jsonl",
    GPU: ".gpu_samples.csv",
    LOG: ".log",
}
"""Ends of the names of an arm's files, by their copies in the imported run."""
SAMPLING: Final = {"temperature": "--temperature", "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p"}
"""Sampling parameters and their flags on the client's command line."""
_MOST_SETTING: Final = 1 << 32
_MOST_COUNT: Final = 1 << 53
_MIB: Final = 1 << 20
_ZONE_S: Final = 900
"""Time zones differ by multiples of a quarter of an hour."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST_COUNT)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 32), le=1 << 32)]
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
_DaySeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=86_400.0)]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``<tag>.meta.json`` that are used; None for those that a run did not write.

    ``wall_clock_s`` is that of the client's process, including its start, imports and the loading of the dataset.
    """

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
    responses_path: str | None = None
    cmd: tuple[str, ...] = ()


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the answers."""

    idx: _Index
    choice_idx: _Index | None = None
    question: str | None = None
    answer: Any = None
    request: dict[str, Any] = {}
    usage: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None
    text: str | None = None
    error: Any = None
    elapsed_s: _DaySeconds | None = None


_ROWS: Final = msgspec.json.Decoder(_Row, strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The outcome of one question; of several attempts the last that was answered, or else the last.

    ``first`` is the first line of that attempt, whose ``elapsed_s`` includes the client's retries. Tokens count the
    prompt once and the output of all choices.
    """

    first: _Row
    choices: tuple[ChoiceRecord, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    num_rows: int
    num_attempts: int

    @property
    def is_failed(self) -> bool:
        return self.first.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The content of the files of one tag.

    ``rows`` are the lines of the answers in the order of the file, ``answered`` all questions in the order of
    their numbers. ``damage`` is that of the answers and of the step log. ``all_lives`` are those of the step log,
    ``lives`` those of the server that answered, and ``num_start_up`` the records at the beginning of each that
    are the server's own. ``body`` is that of a request; those of all requests of a run are alike. ``guidance``
    has the names of a profile, None where no key activates it. ``concurrency`` are the requests open at the same
    time; all of them if that was not recorded.
    """

    tag: str
    paths: Mapping[str, Path]
    meta: Meta
    rows: Sequence[_Row]
    answered: Sequence[Answered]
    damage: Mapping[str, Damage]
    all_lives: Lives
    lives: Lives
    num_start_up: Sequence[int]
    averages: tuple[Averages, ...]
    revisions: tuple[str, ...]
    body: Mapping[str, Any]
    sampling: Mapping[str, float]
    guidance: Mapping[str, Any] | None
    concurrency: int
    durations_s: Sequence[float]


def read_arms(directory: Path) -> tuple[Arm, ...]:
    """The arms of a directory, the baseline first, read as far as possible.

    Raises UsageError without a baseline, InvalidDataError for a damaged meta file.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; name one that the LenVM timing scripts wrote")
    names = _names_in(directory)
    ends = (_SUFFIXES[META], _SUFFIXES[STEPS])
    tags = {name.removesuffix(end) for name in names for end in ends if name.endswith(end)}
    if BASELINE not in tags:
        raise UsageError(
            f"{directory} has neither {' nor '.join(BASELINE + end for end in ends)}; name a directory that the "
            "LenVM timing scripts wrote"
        )
    return tuple(_read_arm(directory, tag, names) for tag in sorted(tags, key=lambda tag: (tag != BASELINE, tag)))


def _names_in(directory: Path) -> list[str]:
    """Names of the files, without links: what they lead to would be copied into the results."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}; correct its permissions") from error
    for path in paths:
        if path.is_symlink() and path.name.endswith(tuple(_SUFFIXES.values())):
            raise UsageError(f"{path} is a link; put a copy of the file in its place")
    return [path.name for path in paths if not path.is_symlink()]


def _read_arm(directory: Path, tag: str, names: Sequence[str]) -> Arm:
    exact = {copy: directory / f"{tag}{suffix}" for copy, suffix in _SUFFIXES.items() if f"{tag}{suffix}" in names}
    meta = _read_meta(exact.get(META))
    paths = {**_named_otherwise(directory, tag, names, meta), **exact}
    answered, rows, damage = read_responses(lines_of(paths.get(RESPONSES)))
    all_lives, step_damage = read_timing(lines_of(paths.get(STEPS)))
    log = [line.decode(errors="replace").rstrip("\r\n") for line in lines_of(paths.get(LOG))]
    averages = read_averages(log)
    body = next((each.first.request for each in answered if each.first.request), {})
    sampling = _sampling(body, meta)
    counts = [each.completion_tokens for each in answered if not each.is_failed]
    token_counts = [count for count in counts if count is not None]
    is_complete = bool(token_counts) and len(token_counts) == len(counts)
    lives = last_lives(all_lives, sum(token_counts) if is_complete else None)
    is_greedy = sampling.get("top_k") == 1 or sampling.get("temperature") == 0
    has_output = bool(all_lives or averages)
    return Arm(
        tag=tag,
        paths=paths,
        meta=meta,
        rows=rows,
        answered=answered,
        damage={RESPONSES: damage, STEPS: step_damage},
        all_lives=all_lives,
        lives=lives,
        num_start_up=[num_start_up(life, is_greedy_run=is_greedy) for life in lives],
        averages=averages,
        revisions=revisions_of((record for life in lives for record in life), log) if has_output else (),
        body=body,
        sampling=sampling,
        guidance=_guidance(body, meta),
        concurrency=meta.max_concurrency or max(1, len(answered)),
        durations_s=[each.first.elapsed_s or 0.0 for each in answered],
    )


def _named_otherwise(directory: Path, tag: str, names: Sequence[str], meta: Meta) -> dict[str, Path]:
    """Answers and log, whose names hold more than the tag, such as ``gsm8k.baseline_q50_n16`` and
    ``server.baseline``; several that fit are none.

    The path in the meta file is one of the machine that measured.
    """
    paths: dict[str, Path] = {}
    for copy in (RESPONSES, LOG):
        stems = [name.removesuffix(_SUFFIXES[copy]) for name in names if name.endswith(_SUFFIXES[copy])]
        of_tag = [
            stem for stem in stems if any(part == tag or part.startswith(f"{tag}_q") for part in stem.split("."))
        ]
        if len(of_tag) == 1:
            paths[copy] = directory / f"{of_tag[0]}{_SUFFIXES[copy]}"
    recorded = Path(meta.responses_path or "").name
    return paths | ({RESPONSES: directory / recorded} if recorded in names else {})


def _read_meta(path: Path | None) -> Meta:
    """The meta file of a run; an empty one for None. Raises InvalidDataError when it is damaged."""
    if path is None:
        return Meta()
    remedy = (
        "it is not a meta.json of a LenVM timing run: copy it again, or remove it; its own values are then unknown"
    )
    try:
        document: Any = msgspec.json.decode(read_bytes(path))
        return msgspec.convert(document, Meta, strict=False)
    except UnreadableError as error:
        raise InvalidDataError(f"{error}; {remedy}") from error
    except DECODING_ERRORS as error:
        raise InvalidDataError(f"{path}: {decoding_problem(error)}; {remedy}") from error


def lines_of(path: Path | None) -> Iterator[bytes]:
    """The lines of a file with their ends; none without a file. Raises InvalidDataError where it cannot be read."""
    if path is None:
        return
    try:
        yield from (line for _, line in read_lines(path, ROWS_BYTES))
    except UnreadableError as error:
        raise InvalidDataError(f"{error}; copy it again, or remove it") from error


def read_responses(lines: Iterable[bytes]) -> tuple[list[Answered], list[_Row], Damage]:
    """The questions of the answers in these lines, given with their line ends, the lines, and their damage."""
    rows, damage = read_damaged(lines, _row_from)
    by_question: dict[int, list[_Row]] = {}
    for row in rows:
        by_question.setdefault(row.idx, []).append(row)
    return [_answered(by_question[idx]) for idx in sorted(by_question)], rows, damage


def _row_from(line: bytes) -> _Row | None:
    try:
        return _ROWS.decode(line)
    except DECODING_ERRORS:
        return None


def _answered(rows: Sequence[_Row]) -> Answered:
    """The lines of a question, split into attempts at each failed request and at each repeated choice."""
    attempts: list[list[_Row]] = []
    for row in rows:
        choices = {each.choice_idx for each in attempts[-1]} if attempts else set()
        is_new = row.error is not None or row.choice_idx in choices
        if not attempts or is_new or attempts[-1][0].error is not None:
            attempts.append([])
        attempts[-1].append(row)
    counted = next((attempt for attempt in reversed(attempts) if attempt[0].error is None), attempts[-1])
    usage = next((row.usage for row in counted if row.usage), {})
    return Answered(
        first=counted[0],
        choices=tuple(_choice(i, row) for i, row in enumerate(counted) if row.error is None),
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        completion_tokens=_count(usage, "completion_tokens", "output_tokens"),
        num_rows=len(counted),
        num_attempts=len(attempts),
    )


def _choice(position: int, row: _Row) -> ChoiceRecord:
    reason = (row.choice or {}).get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason  # as SGLang's own API states it
    return ChoiceRecord(
        index=position if row.choice_idx is None else row.choice_idx,
        text=row.text or "",
        finish_reason=reason[:MOST_WORD_CHARS] if isinstance(reason, str) else None,
    )


def _count(usage: Mapping[str, Any], *names: str) -> int | None:
    value = next((usage[name] for name in names if usage.get(name) is not None), None)
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else None


def whole_number(value: object) -> int | None:
    """A positive whole number that a setting can have; None for anything else."""
    return value if type(value) is int and 0 < value <= _MOST_SETTING else None


def _sampling(body: Mapping[str, Any], meta: Meta) -> dict[str, float]:
    """Sampling parameters on record: in the requests, in the meta file, or on the client's command line."""
    sampling: dict[str, float] = {}
    for name, flag in SAMPLING.items():
        argument = next((word for before, word in pairwise(meta.cmd) if before == flag), None)
        stated = map(_setting, (body.get(name), meta.top_k if name == "top_k" else None, argument))
        if (number := next((each for each in stated if each is not None), None)) is not None:
            sampling[name] = int(number) if name == "top_k" else number
    return sampling


def _setting(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, str) or type(value) in {int, float} else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) <= _MOST_SETTING else None


def _guidance(body: Mapping[str, Any], meta: Meta) -> dict[str, Any] | None:
    """Guidance by the names of a profile, from the requests or else the meta file; None if no key activates it."""
    params = body.get("custom_params")
    if not isinstance(params, dict):
        fields = {"value_scale": meta.value_scale, "mode": meta.value_mode, "gamma": meta.value_gamma}
        params = {} if body else {name: value for name, value in fields.items() if value is not None}
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


def sends_s(durations_s: Sequence[float], concurrency: int) -> tuple[float, ...]:
    """Seconds from the first send to each send, in the order of the queue.

    The LenVM client records no times, only durations. It is a closed loop: each of ``concurrency`` workers takes
    the next question as soon as it is free, so durations determine all times but the first.
    """
    free_at_s = [0.0] * max(1, min(concurrency, len(durations_s)))
    sends = []
    for duration_s in durations_s:
        sends.append(free_at_s[0])
        heapq.heapreplace(free_at_s, free_at_s[0] + duration_s)
    return tuple(sends)


def makespan_s(durations_s: Sequence[float], concurrency: int) -> float:
    """Seconds from the first send to the last answer."""
    sends = sends_s(durations_s, concurrency)
    return max((start + duration for start, duration in zip(sends, durations_s, strict=True)), default=0.0)


def read_gpu_samples(lines: Iterable[str], *, start_epoch_s: float | None, start_ns: int) -> Iterator[GpuSample]:
    """The samples of nvidia-smi, once per second and in local time, of a run that began at ``start_epoch_s``, on a
    clock that was ``start_ns`` then.

    The time zone is the one that puts the first sample next to that moment; if it is unknown, the first sample is
    the moment. Other lines (the header, half a line) are skipped.
    """
    origin_s: float | None = None
    for line in lines:
        try:
            moment, *cells = next(csv.reader([line], skipinitialspace=True), [""])
            local_s = datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
            index, utilization, memory_mib = map(_gpu_number, cells)
        except (ValueError, csv.Error):
            continue
        if origin_s is None:
            begin_s = local_s if start_epoch_s is None else start_epoch_s
            origin_s = begin_s + round((local_s - begin_s) / _ZONE_S) * _ZONE_S
        # Above the duration of a run, and its time zone: three years
        if abs(local_s - origin_s) > 1e8:
            continue
        yield GpuSample(
            t_ns=start_ns + round((local_s - origin_s) * NS_PER_S),
            index=int(index or 0),
            source="nvidia-smi",
            utilization_frac=None if utilization is None else utilization / 100,
            memory_used_bytes=None if memory_mib is None else round(memory_mib * _MIB),
        )


def _gpu_number(text: str) -> float | None:
    """A number; None for ``[N/A]``, which a device does not report. Raises ValueError for an impossible one."""
    if text.startswith("["):
        return None
    # Above every share in percent and every memory in MiB
    if not 0 <= (number := float(text)) <= 1e9:
        raise ValueError(text)
    return number
