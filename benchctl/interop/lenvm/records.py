"""A LenVM timing directory as a profile and the records of its runs."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.costs.shapes import shape_for
from benchctl.errors import InvalidDataError, ProfileError, UsageError
from benchctl.interop.lenvm.directory import Answered, ArmData, lines_of, read_gpu_samples, sends_s, whole_number
from benchctl.interop.lenvm_log import SAMPLER, step_records
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile
from benchctl.records.finish_reasons import finish_error
from benchctl.records.record import Message, PreparedRequest, RequestError, RequestRecord, RunTimes
from benchctl.records.schema import GpuSample, StepRecord
from benchctl.units import NS_PER_MS, NS_PER_S

DEFAULT_MODEL: Final = "Qwen/Qwen2.5-7B-Instruct"
DEFAULT_VALUE_MODEL: Final = "namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"
"""Models of the published experiment, the defaults of its scripts."""
_SEPARATOR: Final = "_vs_"
_RESULTS_SUFFIX: Final = re.compile(r"_k\d+$")
_DATASETS: Final = frozenset({"gsm8k"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Base and value model, which no file of such a directory names."""

    base: str
    value: str
    is_assumed: bool


def models_of(directory: Path, base: str | None, value: str | None) -> Models:
    """The models by argument, else by the directory's name (``BASE_vs_VALUE``), else the published pair.

    Raises UsageError for a name that is neither a known shape nor a directory with one.
    """
    name = _RESULTS_SUFFIX.sub("", directory.resolve().name)
    named_base, separator, named_value = name.partition(_SEPARATOR)
    for text in (base, value):
        if text is not None:
            shape_for(text)
    return Models(
        base=base or (named_base if separator and _is_known(named_base) else DEFAULT_MODEL),
        value=value or (named_value if separator and _is_known(named_value) else DEFAULT_VALUE_MODEL),
        is_assumed=not (separator and _is_known(named_base) and _is_known(named_value)) and (not base or not value),
    )


def _is_known(model: str) -> bool:
    try:
        shape_for(model)
    except UsageError:
        return False
    return True


def profile_of_arms(name: str, arms: Sequence[ArmData], models: Models, revision: str | None) -> Profile:
    """The profile. Raises InvalidDataError if no server could have been asked for the recorded settings."""
    base = arms[0]
    meta, dataset = base.meta, base.meta.dataset
    num_questions = max((len(arm.responses.answered) for arm in arms), default=0) or meta.max_questions or 1
    plain: dict[str, Any] = {
        "name": name,
        "description": f"imported from {name}",
        "blocks": 1,
        "stop": "natural",
        "engine": {"kind": "sglang-lenvm", "options": {"revision": revision}},
        "model": models.base,
        "workload": {
            "dataset": dataset if dataset in _DATASETS else "generated",
            "num_prompts": num_questions,
            "samples_per_prompt": whole_number(base.body.get("n")) or meta.n_samples_per_q or 1,
            "max_tokens": whole_number(base.body.get("max_tokens")) or meta.max_tokens or 1,
            "arrival": {"kind": "closed-loop", "max_concurrency": base.concurrency},
            "num_warmups": 0,
            "allow_prefix_cache_hits": True,
        },
        "variants": {variant_name(arm.tag): _variant(arm, models) for arm in arms},
        "allowed_differences": ["sampling.top_k", "server.value_model", "server.overlap_schedule", "guidance.*"],
        "primary_metrics": ["wall_s", "output_throughput", "e2el_ms"],
    }
    try:
        return profile_from_plain(plain, name)
    except ProfileError as error:
        raise InvalidDataError(
            f"{name}: the recorded settings are impossible, or unknown to benchctl:\n{error}"
        ) from error


def variant_name(tag: str) -> str:
    """A tag as the name of a variant."""
    return re.sub(r"[^a-z0-9._-]+", "-", tag.lower()).strip("-._") or "untagged"


def _variant(arm: ArmData, models: Models) -> dict[str, Any]:
    variant: dict[str, Any] = {"sampling": arm.sampling}
    if arm.guidance is not None:
        variant["server"] = {"value_model": models.value, "overlap_schedule": False}
        variant["guidance"] = arm.guidance
    return variant


def start_ns(arm: ArmData, origin_epoch_s: float | None) -> int:
    """Start of an arm's client, on a clock that was 0 at ``origin_epoch_s``."""
    started_s = arm.meta.wall_start_epoch_s
    return 0 if started_s is None or origin_epoch_s is None else round((started_s - origin_epoch_s) * NS_PER_S)


def started_at(arm: ArmData) -> str | None:
    """Start of an arm's client by the wall clock, UTC."""
    epoch_s = arm.meta.wall_start_epoch_s
    return None if epoch_s is None else datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="seconds")


def first_send_ns(arm: ArmData, client_start_ns: int) -> int:
    """Time of the first send: the makespan of all answers before the end of the client."""
    wall_s = arm.meta.wall_clock_s
    slack_s = 0.0 if wall_s is None else max(0.0, wall_s - arm.makespan_s)
    return client_start_ns + round(slack_s * NS_PER_S)


def times_of(requests: Sequence[RequestRecord]) -> RunTimes:
    """First send and last answer; the other times are unknown."""
    sent = [request.sent_ns for request in requests if request.sent_ns is not None]
    done = [request.done_ns for request in requests if request.done_ns is not None]
    return RunTimes(first_send_ns=min(sent, default=None), last_token_ns=max(done, default=None))


def requests_of(arm: ArmData, client_start_ns: int) -> Iterator[RequestRecord]:
    """A record for each question of an arm."""
    begin_ns = first_send_ns(arm, client_start_ns)
    sends = sends_s(arm.durations_s, arm.concurrency)
    for answered, send_s in zip(arm.responses.answered, sends, strict=True):
        yield request_of(answered, begin_ns + round(send_s * NS_PER_S))


def request_of(answered: Answered, sent_ns: int) -> RequestRecord:
    """The record of one question, sent at a reconstructed time."""
    is_timed = answered.elapsed_s is not None
    done_ns = sent_ns + round((answered.elapsed_s or 0.0) * NS_PER_S)
    error = finish_error(choice.finish_reason for choice in answered.choices)
    if answered.error is not None:
        error = RequestError(kind="server-error", message=answered.error)
    return RequestRecord(
        request_id=request_id(answered.idx),
        index=answered.idx,
        scheduled_ns=sent_ns,
        sent_ns=sent_ns if is_timed else None,
        done_ns=done_ns if error is None else None,
        stamps="whole",
        choices=answered.choices,
        prompt_tokens=answered.prompt_tokens,
        completion_tokens=answered.completion_tokens,
        error=error,
    )


def request_id(idx: int) -> str:
    return f"q{idx:05d}"


def prepared_requests(arms: Sequence[ArmData]) -> tuple[PreparedRequest, ...]:
    """The questions of all arms, in order. The client sent no seeds: they are 0 here."""
    by_index: dict[int, PreparedRequest] = {}
    for arm in arms:
        for answered in arm.responses.answered:
            if answered.idx not in by_index and (prepared := _prepared(arm, answered)) is not None:
                by_index[answered.idx] = prepared
    return tuple(by_index[idx] for idx in sorted(by_index))


def _prepared(arm: ArmData, answered: Answered) -> PreparedRequest | None:
    body, dataset = answered.body, arm.meta.dataset or "unknown"
    messages = _messages(body.get("messages"))
    prompt = None if messages else (answered.question or "")
    return PreparedRequest(
        request_id=request_id(answered.idx),
        index=answered.idx,
        arrival_ns=0,
        messages=messages or None,
        prompt=prompt,
        prompt_tokens=answered.prompt_tokens or 0,
        max_tokens=whole_number(body.get("max_tokens")) or arm.meta.max_tokens or 1,
        n=whole_number(body.get("n")) or arm.meta.n_samples_per_q or max(1, len(answered.choices)),
        seed=0,
        source=f"{dataset}:{answered.idx}",
        answer=answered.gold,
    )


def _messages(chat: object) -> tuple[Message, ...]:
    try:
        return msgspec.convert(chat, tuple[Message, ...])
    except msgspec.ValidationError:
        return ()


def steps_of(arm: ArmData) -> Iterator[StepRecord]:
    """The steps of the server that answered; those of its own start are marked as warm-up."""
    num_before, origin_ns = 0, 0
    for life in arm.lives:
        durations_ns = (round(record.sections_ms[SAMPLER] * NS_PER_MS) for record in life)
        spans = [(start, end - start) for start, end in pairwise(accumulate(durations_ns, initial=origin_ns))]
        own = arm.num_start_up(life)
        for index, step in enumerate(step_records(life, spans, first_step=num_before + 1)):
            yield msgspec.structs.replace(step, is_warmup=True) if index < own else step
        num_before += len(life)
        origin_ns = spans[-1][0] + spans[-1][1]


def gpu_of(arm: ArmData, client_start_ns: int) -> Iterable[GpuSample]:
    """Samples of the devices of the host; nvidia-smi started with the client."""
    if arm.files.gpu_samples is None:
        return ()
    lines = (line.decode(errors="replace") for line in lines_of(arm.files.gpu_samples))
    return read_gpu_samples(lines, start_epoch_s=arm.meta.wall_start_epoch_s, start_ns=client_start_ns)


def sha256_of_files(arms: Sequence[ArmData]) -> dict[str, str]:
    """SHA-256 of each file that was read, by name."""
    paths = chain.from_iterable(arm.files.paths.values() for arm in arms)
    return {path.name: _sha256(path) for path in sorted(set(paths))}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
