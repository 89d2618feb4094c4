"""Import of a directory of the LenVM timing scripts as a result directory: one block, a run for each arm.

The clock of the records begins when the first client of the directory started. Neither sends nor steps have times
in such a directory. Sends follow from the durations of requests (``sends_s``), placed so that the last answer came
as the client ended: its start holds imports and the loading of the dataset, its end nothing. Steps keep their
order, with the time of their sampler as their duration, and the run records that (``steps_cover``).
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

import benchctl
from benchctl.analysis.validity.answers import answer_end_warnings
from benchctl.analysis.validity.checks import failed_checks, reconcile
from benchctl.costs.shapes import shape_for
from benchctl.errors import InvalidDataError, ProfileError, UsageError
from benchctl.interop.lenvm.directory import (
    BASELINE,
    GPU,
    LOG,
    META,
    Answered,
    Arm,
    lines_of,
    makespan_s,
    read_arms,
    read_gpu_samples,
    sends_s,
    whole_number,
)
from benchctl.interop.lenvm.summary import SUMMARY_NAME, Models, directory_warnings, lenvm_csv
from benchctl.interop.lenvm_log import ALL, SAMPLER, step_records, windows_of
from benchctl.profile.load import dump_profile, profile_from_plain, profile_sha256
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory, RunDirectory, run_directory_name
from benchctl.records.files import encode, write_bytes_atomic, write_json_atomic
from benchctl.records.finish_reasons import finish_error
from benchctl.records.integrity import digests_of_run, record_run
from benchctl.records.loaded import load_run
from benchctl.records.record import (
    Manifest,
    Message,
    Plan,
    PlannedRun,
    PreparedRequest,
    RequestError,
    RequestRecord,
    RunRecord,
    RunTimes,
)
from benchctl.records.schema import SCHEMA_VERSION, HostInfo, Imported, ResultWarning, StepRecord
from benchctl.records.warning_codes import warnings_of
from benchctl.units import NS_PER_MS, NS_PER_S
from benchctl.untrusted.secrets import copy_redacted, environment_redactor
from benchctl.workload.datasets.base import sha256_of

DEFAULT_MODEL: Final = "Qwen/Qwen2.5-7B-Instruct"
DEFAULT_VALUE_MODEL: Final = "namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"
"""Models of the published experiment, the defaults of its scripts."""
WINDOWS_NAME: Final = "timing_windows.jsonl"
_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """An imported directory: its path, its warnings and its runs."""

    path: Path
    warnings: tuple[ResultWarning, ...]
    runs: tuple[RunRecord, ...]


def import_lenvm(
    source: Path, out: Path | None, *, model: str | None, value_model: str | None, argv: Sequence[str]
) -> ImportResult:
    """Write a result directory from ``source`` at ``out``, by default below ``results``.

    Raises UsageError when ``source`` is not such a directory or ``out`` exists, InvalidDataError when its files
    record impossible settings. Nothing is written then.
    """
    arms = read_arms(source)
    models = models_of(source, model, value_model)
    of_arms = [set(arm.revisions) for arm in arms if arm.revisions]
    revisions = sorted(set(ALL).intersection(*of_arms)) if of_arms else []
    revision = revisions[0] if len(revisions) == 1 else None
    profile = _profile(f"lenvm-{variant_name(source.resolve().name)}", arms, models, revision)
    # The client sent no seeds: they are 0 here
    questions = {each.first.idx: (arm, each) for arm in reversed(arms) for each in arm.answered}
    prepared = tuple(_prepared_request(*questions[idx]) for idx in sorted(questions))
    requests = _lines(prepared)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        state="done",
        profile=profile.name,
        profile_sha256=profile_sha256(profile),
        request_set_sha256=hashlib.sha256(requests).hexdigest(),
        dataset=arms[0].meta.dataset or _UNKNOWN,
        seed=profile.seed,
        blocks=1,
        baseline=profile.baseline,
        stop=profile.stop,
        engine=profile.engine.kind,
        label=f"imported from {source.resolve()}",
        created_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        argv=tuple(argv),
        benchctl_version=benchctl.__version__,
        host=HostInfo(hostname=_UNKNOWN, platform=_UNKNOWN, python=_UNKNOWN),
        imported=Imported(
            tool="lenvm",
            source=str(source.resolve()),
            sha256={
                path.name: sha256_of(path) for path in sorted({path for arm in arms for path in arm.paths.values()})
            },
            revisions=tuple(revisions),
        ),
        warnings=directory_warnings(arms, models),
    )
    path = out or Path("results") / profile.name / manifest.directory_name
    if path.exists():
        raise UsageError(f"{path} exists; name another directory with -o, or remove it")
    unfinished = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        unfinished.mkdir(parents=True)
        results = ResultDirectory(unfinished)
        results.write_profile(dump_profile(profile))
        results.write_prepared_requests(requests)
        runs = _write_runs(results, arms, profile, prepared)
        state = "done" if all(run.state == "done" for run in runs) else "suspect"
        results.write_manifest(msgspec.structs.replace(manifest, state=state))
        for run in runs:
            record_run(results, run.run_id)
        write_bytes_atomic(unfinished / SUMMARY_NAME, lenvm_csv(arms, models))
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ImportResult(path=path, warnings=manifest.warnings, runs=runs)


def models_of(directory: Path, base: str | None, value: str | None) -> Models:
    """The models by argument, else by the directory's name (``BASE_vs_VALUE``), else the published pair.

    Raises UsageError for a name that is neither a known shape nor a directory with one.
    """
    for text in (base, value):
        if text is not None:
            shape_for(text)
    names = re.sub(r"_k\d+$", "", directory.resolve().name).split("_vs_", 1)
    named_base, named_value = (
        name if _is_known(name) else None for name in (names if len(names) == 2 else ("", ""))
    )
    return Models(
        base=base or named_base or DEFAULT_MODEL,
        value=value or named_value or DEFAULT_VALUE_MODEL,
        is_assumed=not (named_base and named_value) and not (base and value),
    )


def _is_known(model: str) -> bool:
    try:
        shape_for(model)
    except UsageError:
        return False
    return True


def variant_name(tag: str) -> str:
    """A tag as the name of a variant."""
    return re.sub(r"[^a-z0-9._-]+", "-", tag.lower()).strip("-._") or "untagged"


def _profile(name: str, arms: Sequence[Arm], models: Models, revision: str | None) -> Profile:
    """The profile, from the settings that the files record; the configuration of servers is unknown.

    Raises InvalidDataError if no server could have been asked for them.
    """
    base = arms[0]
    meta, dataset = base.meta, base.meta.dataset
    num_questions = max((len(arm.answered) for arm in arms), default=0) or meta.max_questions or 1
    variants: dict[str, dict[str, Any]] = {}
    server = {"value_model": models.value, "overlap_schedule": False}
    for arm in arms:
        guided = {"server": server, "guidance": arm.guidance} if arm.guidance else {}
        variants[variant_name(arm.tag)] = {"sampling": arm.sampling, **guided}
    plain: dict[str, Any] = {
        "name": name,
        "description": f"imported from {name}",
        "blocks": 1,
        "stop": "natural",
        "engine": {"kind": "sglang-lenvm", "options": {"revision": revision}},
        "model": models.base,
        "workload": {
            "dataset": dataset if dataset == "gsm8k" else "generated",
            "num_prompts": num_questions,
            "samples_per_prompt": whole_number(base.body.get("n")) or meta.n_samples_per_q or 1,
            "max_tokens": whole_number(base.body.get("max_tokens")) or meta.max_tokens or 1,
            "arrival": {"kind": "closed-loop", "max_concurrency": base.concurrency},
            "num_warmups": 0,
            "allow_prefix_cache_hits": True,
        },
        "variants": variants,
        "allowed_differences": ["sampling.top_k", "server.value_model", "server.overlap_schedule", "guidance.*"],
        "primary_metrics": ["wall_s", "output_throughput", "e2el_ms"],
    }
    try:
        return profile_from_plain(plain, name)
    except ProfileError as error:
        raise InvalidDataError(
            f"{name}: the recorded settings are impossible, or unknown to benchctl:\n{error}"
        ) from error


def _prepared_request(arm: Arm, answered: Answered) -> PreparedRequest:
    first, body = answered.first, answered.first.request
    try:
        messages = msgspec.convert(body.get("messages"), tuple[Message, ...])
    except msgspec.ValidationError:
        messages = ()
    return PreparedRequest(
        request_id=_request_id(first.idx),
        index=first.idx,
        arrival_ns=0,
        messages=messages or None,
        prompt=None if messages else (first.question or ""),
        prompt_tokens=answered.prompt_tokens or 0,
        max_tokens=whole_number(body.get("max_tokens")) or arm.meta.max_tokens or 1,
        n=whole_number(body.get("n")) or arm.meta.n_samples_per_q or max(1, len(answered.choices)),
        seed=0,
        source=f"{arm.meta.dataset or 'unknown'}:{first.idx}",
        answer=None if first.answer is None else str(first.answer),
    )


def _request_id(idx: int) -> str:
    return f"q{idx:05d}"


def _lines(records: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(encode(record) + b"\n" for record in records)


def _write_runs(
    results: ResultDirectory, arms: Sequence[Arm], profile: Profile, prepared: Sequence[PreparedRequest]
) -> tuple[RunRecord, ...]:
    """Plan and runs, in the order of time; a run with the warnings of its checks is suspect if it has any."""
    in_time = sorted(arms, key=lambda arm: (arm.meta.wall_start_epoch_s or 0.0, arm.tag != BASELINE))
    planned_runs = tuple(
        PlannedRun(index=i, run_id=run_directory_name(i, 0, variant, {}), block=0, position=i, variant=variant)
        for i, variant in enumerate(variant_name(arm.tag) for arm in in_time)
    )
    results.write_plan(Plan(schema_version=SCHEMA_VERSION, runs=planned_runs))
    starts_s = [arm.meta.wall_start_epoch_s for arm in arms if arm.meta.wall_start_epoch_s is not None]
    runs = []
    for arm, planned in zip(in_time, planned_runs, strict=True):
        started_s = arm.meta.wall_start_epoch_s
        start_ns = 0 if started_s is None else round((started_s - min(starts_s)) * NS_PER_S)
        directory = results.run(planned.run_id)
        settings = variant_settings(profile, planned.variant, planned.cell)
        run = _write_run(directory, arm, planned, profile, settings, start_ns)
        loaded = load_run(directory)
        failed = failed_checks(loaded, reconcile(loaded, profile, settings, prepared, profile.stop))
        warnings = (*run.warnings, *failed)
        state = "suspect" if warnings else "done"
        run = msgspec.structs.replace(run, warnings=warnings, state=state, files=digests_of_run(directory))
        write_json_atomic(directory.path / "run.json", run)
        runs.append(run)
    return tuple(runs)


def _write_run(
    directory: RunDirectory,
    arm: Arm,
    planned: PlannedRun,
    profile: Profile,
    settings: VariantSettings,
    start_ns: int,
) -> RunRecord:
    """The files and records of an arm whose client started at ``start_ns``."""
    started_s = arm.meta.wall_start_epoch_s
    requests = list(_requests_of(arm, start_ns))
    directory.path.mkdir(parents=True)
    for name, path in arm.paths.items():
        # Copies that may hold secrets of the server
        if name in {LOG, META}:
            copy_redacted(path, directory.path / name, environment_redactor())
        else:
            shutil.copyfile(path, directory.path / name)
    samples = (line.decode(errors="replace") for line in lines_of(arm.paths.get(GPU)))
    records: dict[str, Iterable[msgspec.Struct]] = {
        "requests": requests,
        "steps": _steps_of(arm),
        "gpu": read_gpu_samples(samples, start_epoch_s=started_s, start_ns=start_ns),
    }
    for name, of_kind in records.items():
        write_bytes_atomic(directory.path / f"{name}.jsonl", _lines(of_kind))
    if windows := list(windows_of(arm.averages)):
        lines = b"".join(msgspec.json.encode(window) + b"\n" for window in windows)
        write_bytes_atomic(directory.path / WINDOWS_NAME, lines)
    sent = [request.sent_ns for request in requests if request.sent_ns is not None]
    done = [request.done_ns for request in requests if request.done_ns is not None]
    num_failed = sum(request.error is not None for request in requests)
    guidance = {} if settings.guidance is None else settings.guidance.model_dump(mode="json", exclude_none=True)
    guidance_config = {f"guidance.{key}": value for key, value in guidance.items()}
    run = RunRecord(
        schema_version=SCHEMA_VERSION,
        **msgspec.structs.asdict(planned),
        state="done",
        attempt=1,
        engine=profile.engine.kind,
        # As far as requests record it: the configuration of the server is unknown.
        effective_config={"model": settings.model, **settings.stated(), **guidance_config},
        started_at=None
        if started_s is None
        else datetime.fromtimestamp(started_s, UTC).isoformat(timespec="seconds"),
        times=RunTimes(first_send_ns=min(sent, default=None), last_token_ns=max(done, default=None)),
        steps_cover="sampler",
        num_sent=len(requests),
        num_completed=len(requests) - num_failed,
        num_failed=num_failed,
        warnings=_run_warnings(arm, requests, planned.run_id),
    )
    directory.write(run)
    return run


def _requests_of(arm: Arm, client_start_ns: int) -> Iterator[RequestRecord]:
    """A record for each question, of which the last was answered as the client ended."""
    slack_s = (arm.meta.wall_clock_s or 0.0) - makespan_s(arm.durations_s, arm.concurrency)
    begin_ns = client_start_ns + round(max(0.0, slack_s) * NS_PER_S)
    sends = sends_s(arm.durations_s, arm.concurrency)
    for answered, send_s in zip(arm.answered, sends, strict=True):
        yield request_of(answered, begin_ns + round(send_s * NS_PER_S))


def request_of(answered: Answered, sent_ns: int) -> RequestRecord:
    """The record of one question, sent at a reconstructed time."""
    first = answered.first
    error = finish_error(choice.finish_reason for choice in answered.choices)
    if answered.is_failed:
        message = first.error if isinstance(first.error, str) else msgspec.json.encode(first.error).decode()
        error = RequestError(kind="server-error", message=message)
    return RequestRecord(
        request_id=_request_id(first.idx),
        index=first.idx,
        scheduled_ns=sent_ns,
        sent_ns=None if first.elapsed_s is None else sent_ns,
        done_ns=sent_ns + round((first.elapsed_s or 0.0) * NS_PER_S) if error is None else None,
        stamps="whole",
        choices=answered.choices,
        prompt_tokens=answered.prompt_tokens,
        completion_tokens=answered.completion_tokens,
        error=error,
    )


def _steps_of(arm: Arm) -> Iterator[StepRecord]:
    """The steps of the server that answered; those of its own start are marked as warm-up."""
    num_before, origin_ns = 0, 0
    for life, num_own in zip(arm.lives, arm.num_start_up, strict=True):
        durations_ns = (round(record.sections_ms[SAMPLER] * NS_PER_MS) for record in life)
        times_ns = list(accumulate(durations_ns, initial=origin_ns))
        spans = [(start, end - start) for start, end in pairwise(times_ns)]
        for index, step in enumerate(step_records(life, spans, first_step=num_before + 1)):
            yield msgspec.structs.replace(step, is_warmup=True) if index < num_own else step
        num_before += len(life)
        origin_ns = times_ns[-1]


def _run_warnings(arm: Arm, requests: Sequence[RequestRecord], run_id: str) -> tuple[ResultWarning, ...]:
    """The warnings that make a run suspect."""
    num_repeated = sum(answered.num_attempts > 1 for answered in arm.answered)
    wall_s, took_s = arm.meta.wall_clock_s, makespan_s(arm.durations_s, arm.concurrency)
    evidence = f"{num_repeated} questions have lines of several attempts" if num_repeated else None
    if evidence is None and wall_s is not None and took_s > wall_s:
        evidence = f"the answers took {took_s:.2f} s together and the wall clock says {wall_s:.2f} s"
    num_failed = sum(request.error is not None for request in requests)
    resumed = f"the client was restarted and took over earlier answers: {evidence}; wall_s holds for neither run"
    failed = f"{num_failed} of {len(requests)} requests failed"
    warnings = (
        *warnings_of({"answers-resumed": resumed if evidence else None}),
        *answer_end_warnings(requests, is_forced=False),
        *warnings_of({"failed-requests": failed if num_failed else None}),
    )
    return tuple(msgspec.structs.replace(warning, where=run_id) for warning in warnings)
