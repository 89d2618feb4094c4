"""An arm of a LenVM timing directory as the records of a run.

The clock of the records begins when the first client of the directory started. Neither sends nor steps have times
in such a directory. Sends follow from the durations of requests (``sends_s``), placed so that the last answer came
as the client ended: its start holds imports and the loading of the dataset, its end nothing. Steps keep their
order, with the time of their sampler as their duration, and the run records that (``steps_cover``).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate, chain, pairwise
from pathlib import Path

import msgspec

from benchctl.interop.lenvm.arm import ArmData, lines_of, sends_s, whole_number
from benchctl.interop.lenvm.gpu_samples import read_gpu_samples
from benchctl.interop.lenvm.responses import Answered
from benchctl.interop.readers.lenvm_timing import SAMPLER, step_records
from benchctl.records.finish_reasons import finish_error
from benchctl.records.record import Message, PreparedRequest, RequestError, RequestRecord, RunTimes
from benchctl.records.schema import GpuSample, StepRecord
from benchctl.units import NS_PER_MS, NS_PER_S


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
