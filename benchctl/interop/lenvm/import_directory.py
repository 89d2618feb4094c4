"""Import of a directory of the LenVM timing scripts as a result directory: one block, a run for each arm."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

import benchctl
from benchctl.analysis.validity.answers import answer_end_warnings
from benchctl.analysis.validity.checks import failed_checks, reconcile
from benchctl.errors import UsageError
from benchctl.interop.lenvm.directory import ArmData, find_arms, read_arm
from benchctl.interop.lenvm.records import (
    Models,
    gpu_of,
    models_of,
    prepared_requests,
    profile_of_arms,
    requests_of,
    sha256_of_files,
    start_ns,
    started_at,
    steps_of,
    times_of,
    variant_name,
)
from benchctl.interop.lenvm.summary import SUMMARY_NAME, lenvm_rows, rows_csv
from benchctl.interop.lenvm.warnings import directory_warnings
from benchctl.interop.lenvm_log import ALL, windows_of
from benchctl.profile.load import dump_profile, profile_sha256
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory, RunDirectory, run_directory_name
from benchctl.records.files import encode, write_bytes_atomic, write_json_atomic
from benchctl.records.integrity import digests_of_run, record_run
from benchctl.records.loaded import load_run
from benchctl.records.record import Manifest, Plan, PlannedRun, PreparedRequest, RequestRecord, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, HostInfo, Imported, ResultWarning
from benchctl.untrusted.secrets import copy_redacted, environment_redactor

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
    arms = tuple(read_arm(files) for files in find_arms(source))
    models = models_of(source, model, value_model)
    revisions = _revisions(arms)
    revision = revisions[0] if len(revisions) == 1 else None
    profile = profile_of_arms(f"lenvm-{variant_name(source.resolve().name)}", arms, models, revision)
    manifest = _manifest(source, arms, profile, models, argv)
    path = out or Path("results") / profile.name / manifest.directory_name
    if path.exists():
        raise UsageError(f"{path} exists; name another directory with -o, or remove it")
    unfinished = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        unfinished.mkdir(parents=True)
        runs = _write(ResultDirectory(unfinished), arms, profile, manifest)
        write_bytes_atomic(unfinished / SUMMARY_NAME, rows_csv(lenvm_rows(arms, models)))
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ImportResult(path=path, warnings=manifest.warnings, runs=runs)


def _revisions(arms: Sequence[ArmData]) -> tuple[str, ...]:
    """Revisions that fit the output of all servers of a directory; empty without any output."""
    revisions = [set(arm.revisions) for arm in arms if arm.revisions]
    return tuple(sorted(set(ALL).intersection(*revisions))) if revisions else ()


def _manifest(
    source: Path, arms: Sequence[ArmData], profile: Profile, models: Models, argv: Sequence[str]
) -> Manifest:
    requests = _content(prepared_requests(arms))
    return Manifest(
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
            tool="lenvm", source=str(source.resolve()), sha256=sha256_of_files(arms), revisions=_revisions(arms)
        ),
        warnings=directory_warnings(arms, models),
    )


def _content(requests: Sequence[PreparedRequest]) -> bytes:
    return b"".join(encode(request) + b"\n" for request in requests)


def _write(
    results: ResultDirectory, arms: Sequence[ArmData], profile: Profile, manifest: Manifest
) -> tuple[RunRecord, ...]:
    prepared = prepared_requests(arms)
    results.write_profile(dump_profile(profile))
    results.write_prepared_requests(_content(prepared))
    in_time = sorted(arms, key=lambda arm: (arm.meta.wall_start_epoch_s or 0.0, not arm.is_baseline))
    plan = Plan(schema_version=SCHEMA_VERSION, runs=tuple(_planned(i, arm) for i, arm in enumerate(in_time)))
    results.write_plan(plan)
    starts_s = [arm.meta.wall_start_epoch_s for arm in arms if arm.meta.wall_start_epoch_s is not None]
    origin_epoch_s = min(starts_s, default=None)
    runs = []
    for arm, planned in zip(in_time, plan.runs, strict=True):
        run = _write_run(results.run(planned.run_id), arm, planned, profile, start_ns(arm, origin_epoch_s))
        runs.append(_checked_run(results.run(planned.run_id), run, profile, prepared))
    is_sound = all(run.state == "done" for run in runs)
    results.write_manifest(msgspec.structs.replace(manifest, state="done" if is_sound else "suspect"))
    for run in runs:
        record_run(results, run.run_id)
    return tuple(runs)


_TOLD_BY_SERVERS: Final = frozenset({"server.log", "meta.raw.json"})
"""Copies that may hold secrets of the server."""


def _planned(index: int, arm: ArmData) -> PlannedRun:
    variant = variant_name(arm.tag)
    run_id = run_directory_name(index, 0, variant, {})
    return PlannedRun(index=index, run_id=run_id, block=0, position=index, variant=variant)


def _write_run(
    directory: RunDirectory, arm: ArmData, planned: PlannedRun, profile: Profile, client_start_ns: int
) -> RunRecord:
    requests = list(requests_of(arm, client_start_ns))
    directory.path.mkdir(parents=True)
    for name, path in arm.files.paths.items():
        if name in _TOLD_BY_SERVERS:
            copy_redacted(path, directory.path / name, environment_redactor())
        else:
            shutil.copyfile(path, directory.path / name)
    records = {"requests": requests, "steps": steps_of(arm), "gpu": gpu_of(arm, client_start_ns)}
    for name, of_kind in records.items():
        write_bytes_atomic(directory.path / f"{name}.jsonl", b"".join(encode(record) + b"\n" for record in of_kind))
    if windows := list(windows_of(arm.averages)):
        lines = b"".join(msgspec.json.encode(window) + b"\n" for window in windows)
        write_bytes_atomic(directory.path / WINDOWS_NAME, lines)
    run = RunRecord(
        schema_version=SCHEMA_VERSION,
        **msgspec.structs.asdict(planned),
        state="done",
        attempt=1,
        engine=profile.engine.kind,
        effective_config=_config_from_requests(profile, planned),
        started_at=started_at(arm),
        times=times_of(requests),
        steps_cover="sampler",
        num_sent=len(requests),
        num_completed=sum(request.error is None for request in requests),
        num_failed=sum(request.error is not None for request in requests),
        warnings=_run_warnings(arm, requests, planned.run_id),
    )
    directory.write(run)
    return run


def _config_from_requests(profile: Profile, planned: PlannedRun) -> dict[str, Any]:
    """The settings that the requests of a run record; the configuration of its server is unknown."""
    settings = variant_settings(profile, planned.variant, planned.cell)
    config: dict[str, Any] = {"model": settings.model, **settings.stated()}
    if settings.guidance is not None:
        values = settings.guidance.model_dump(mode="json", exclude_none=True)
        config |= {f"guidance.{key}": value for key, value in values.items()}
    return config


def _run_warnings(arm: ArmData, requests: Sequence[RequestRecord], run_id: str) -> tuple[ResultWarning, ...]:
    """The warnings that make a run suspect."""
    warnings = []
    if (resumed := arm.resumed) is not None:
        message = f"the client was restarted and took over earlier answers: {resumed}; wall_s holds for neither run"
        warnings.append(ResultWarning(code="answers-resumed", message=message, where=run_id))
    ends = answer_end_warnings(requests, is_forced=False)
    warnings += [msgspec.structs.replace(warning, where=run_id) for warning in ends]
    if any(request.error is not None for request in requests):
        message = f"{sum(r.error is not None for r in requests)} of {len(requests)} requests failed"
        warnings.append(ResultWarning(code="failed-requests", message=message, where=run_id))
    return tuple(warnings)


def _checked_run(
    directory: RunDirectory, run: RunRecord, profile: Profile, prepared: Sequence[PreparedRequest]
) -> RunRecord:
    """The run with the warnings of its checks; suspect if it has any."""
    loaded, settings = load_run(directory), variant_settings(profile, run.variant, run.cell)
    checks = reconcile(loaded, profile, settings, prepared, profile.stop)
    warnings = (*run.warnings, *failed_checks(loaded, checks))
    checked = msgspec.structs.replace(
        run, warnings=warnings, state="suspect" if warnings else "done", files=digests_of_run(directory)
    )
    write_json_atomic(directory.path / "run.json", checked)
    return checked
