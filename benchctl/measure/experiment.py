"""An experiment: create its result directory, or reopen one, and do every run that is not done.

The order is the plan's. A failed run is kept and the next one starts; an interrupt stops the experiment with
everything measured so far on disk.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from benchctl.analysis.validity.noise_floor_fit import version_doubt
from benchctl.errors import NotComparableError, RecordError, UsageError
from benchctl.measure.claim import sole_writer
from benchctl.measure.durations import remember_duration
from benchctl.measure.latest import point_latest
from benchctl.measure.looks import Looks, OnLook
from benchctl.measure.noise_on_file import noise_for
from benchctl.measure.provenance import directory_name, new_manifest
from benchctl.measure.run import RunContext, decline_run, measure_run
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.identity import is_profile_of, profile_sha256
from benchctl.profile.load import dump_profile, parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning.plan import plan_runs
from benchctl.records.digests import begin_digests, digest_of, forget_run, read_digests, record_run
from benchctl.records.directory import ResultDirectory, RunDirectory, arm_label, open_results
from benchctl.records.noise import NOISE_FILE, NoiseFloor, load_noise, write_noise
from benchctl.records.run import (
    Look,
    PlannedRun,
    PreparedRequest,
    RunFailure,
    RunRecord,
    RunState,
    StoppingRecord,
)
from benchctl.workload.prepare import PreparedSet

OUT_OF_MEMORY: Final = "out-of-memory"
"""Cause of a failure that makes the settings of a run infeasible here."""
_NAME_IN_USE: Final = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an experiment comes from, as far as the profile does not say it."""

    output_root: Path
    label: str | None
    argv: tuple[str, ...]


def _hear_nothing(_look: Look, _rule: StoppingRecord) -> None:
    """For callers who do not follow the looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """What the caller wants to hear while runs go on."""

    run_started: Callable[[PlannedRun, int], None]
    """The run and how many of its requests there are."""
    request_done: Callable[[int], None]
    """How many requests of the current run have ended."""
    run_ended: Callable[[PlannedRun, RunRecord], None]
    server_said: Callable[[str], None]
    """The last line of the log of a server that is starting."""
    looked: OnLook = _hear_nothing
    """A look at what was measured so far, and the rule that asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the runs of one call."""

    num_done: int
    num_failed: int
    num_suspect: int
    num_skipped: int
    """Runs that an earlier call had done."""


def create_experiment(profile: Profile, prepared: PreparedSet, origin: Origin) -> ResultDirectory:
    """Write everything that is known before the first run; returns the new directory.

    The noise on file for this machine and server goes along, with what is to be doubted of it.
    """
    manifest = msgspec.structs.replace(
        new_manifest(profile, prepared, origin.argv), label=origin.label, gpus=gpu_inventory()
    )
    found = noise_for(profile, manifest)
    manifest = msgspec.structs.replace(manifest, warnings=(*manifest.warnings, *found.warnings))
    with _whole_or_not_at_all(origin.output_root / profile.name, directory_name(manifest)) as (unfinished, finish):
        results = ResultDirectory(unfinished)
        results.write_manifest(manifest)
        results.write_profile(dump_profile(profile))
        results.write_prepared_requests(prepared.content)
        results.write_plan(plan_runs(profile))
        if found.noise is not None:
            write_noise(unfinished / NOISE_FILE, found.noise)
        begin_digests(results)
        path = finish()
    point_latest(path)
    return ResultDirectory(path)


@contextmanager
def _whole_or_not_at_all(parent: Path, stem: str) -> Iterator[tuple[Path, Callable[[], Path]]]:
    """A directory that gets its name when it is complete, so that an interrupt leaves none that cannot be resumed.

    Yields the unfinished directory and the function that names it ``stem``, with a number behind it if two
    experiments start in one second.
    """
    unfinished = parent / f".{stem}.{os.getpid()}.partial"
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"{parent}: result directories cannot be made there ({error.strerror}); choose another --output-dir"
        ) from error

    def finish() -> Path:
        for number in range(1, 1000):
            path = parent / (stem if number == 1 else f"{stem}-{number}")
            try:
                return unfinished.rename(path)
            except OSError as error:
                if error.errno not in _NAME_IN_USE:
                    raise
        raise UsageError(f"{parent / stem}: a thousand directories of this name; choose another --output-dir")

    try:
        yield unfinished, finish
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """A result directory whose experiment goes on, with exactly what it began with."""

    results: ResultDirectory
    profile: Profile
    requests: tuple[PreparedRequest, ...]


def reopen_experiment(path: Path, profile: Profile | None) -> Reopened:
    """Reopen a directory for resuming.

    Raises NotComparableError when ``profile`` is given and is not the one the directory began with, and
    RecordError when the stored profile or request set was changed since.
    """
    if path.is_symlink():  # ``latest`` will name another directory when the next experiment begins
        path = path.parent / path.readlink()
    results = open_results(path)
    manifest = results.manifest()
    if manifest.imported is not None:
        raise UsageError(f"{path} was imported from {manifest.imported.source}: there is nothing to go on with")
    stored_path, text = path / "profile.yaml", results.profile_yaml()
    stored = parse_profile(text, str(stored_path))
    if profile is not None and profile_sha256(profile) != profile_sha256(stored):
        raise NotComparableError(
            f"{path} was begun with another profile: its sha256 is {profile_sha256(stored)[:12]}…, that of "
            f"{profile.name!r} as given now is {profile_sha256(profile)[:12]}…. Resume without --profile and --set "
            "to go on with the stored one, or start a new experiment"
        )
    if not is_profile_of(text, stored, manifest.profile_sha256):
        raise RecordError(f"{stored_path} was changed since the experiment began; restore it, or start a new one")
    request_path = path / "requests.jsonl"
    if hashlib.sha256(request_path.read_bytes()).hexdigest() != manifest.request_set_sha256:
        raise RecordError(f"{request_path} was changed since the experiment began; restore it, or start a new one")
    _refuse_altered_plan(results)
    return Reopened(results=results, profile=stored, requests=results.prepared_requests())


def _refuse_altered_plan(results: ResultDirectory) -> None:
    """What the plan held is recorded since digests are; the order of an older directory is believed."""
    digests, path = read_digests(results.path), results.path / "plan.json"
    recorded = None if digests is None else digests.files.get(path.name)
    if recorded is not None and recorded.sha256 != digest_of(path).sha256:
        raise RecordError(f"{path} was changed since the experiment began; restore it, or start a new one")


def pending_runs(results: ResultDirectory) -> tuple[PlannedRun, ...]:
    """The runs that are not done, in plan order, without blocks that a stopping rule made unnecessary."""
    return tuple(planned for planned in results.due_plan().runs if not _is_done(results.run(planned.run_id)))


def run_experiment(
    results: ResultDirectory, profile: Profile, requests: Sequence[PreparedRequest], listener: Listener
) -> Outcome:
    """Do every run that is not done, in plan order, until the last or until the declared stopping rule ends it.

    A KeyboardInterrupt passes through after the manifest says ``failed``; what was measured is kept. Raises
    UsageError when another benchctl measures into the directory.
    """
    with sole_writer(results.path):
        return _do_runs(results, profile, requests, listener)


def _do_runs(
    results: ResultDirectory, profile: Profile, requests: Sequence[PreparedRequest], listener: Listener
) -> Outcome:
    context = RunContext(
        profile=profile,
        requests=tuple(requests),
        on_progress=listener.request_done,
        on_log_line=listener.server_said,
    )
    pending = pending_runs(results)
    num_skipped = len(results.due_plan().runs) - len(pending)
    outcome = Outcome(num_done=0, num_failed=0, num_suspect=0, num_skipped=num_skipped)
    infeasible: dict[str, RunRecord] = {}
    looks = Looks(results, profile, listener.looked)
    noise, gpus = load_noise(results.path), [gpu.name for gpu in results.manifest().gpus]
    _set_state(results, "running")
    try:
        begin_digests(results)
        for planned in pending:
            looks.take(planned.block, infeasible)
            if looks.is_needless(planned.block):
                break
            listener.run_started(planned, len(requests))
            began_s = time.monotonic()
            with _recorded(results, planned):
                record = _measure_feasible(context, planned, results.run(planned.run_id), infeasible)
            remember_duration(profile, requests, record, time.monotonic() - began_s, gpus)
            outcome = _count(outcome, record.state)
            _doubt_version(results, noise, record)
            listener.run_ended(planned, record)
        else:
            looks.take(profile.blocks, infeasible)
    except BaseException:
        with suppress(OSError):  # a full disk is told as what it did to the run
            _set_state(results, "failed")
        raise
    _set_state(results, _final_state(outcome))
    return outcome


@contextmanager
def _recorded(results: ResultDirectory, planned: PlannedRun) -> Iterator[None]:
    """While the run goes on nothing is recorded of its end; however it ends, its record is."""
    with suppress(OSError):  # a full disk is told as what it did to the run
        forget_run(results, planned.run_id)
    try:
        yield
    finally:
        with suppress(OSError):
            record_run(results, planned.run_id)


def _measure_feasible(
    context: RunContext, planned: PlannedRun, directory: RunDirectory, infeasible: dict[str, RunRecord]
) -> RunRecord:
    """Do a run, unless an earlier one of its arm ran out of memory: with the same settings so would this one.

    ``infeasible`` holds the first such run of each arm, by the arm's name.
    """
    arm = arm_label(planned.variant, planned.cell)
    if first := infeasible.get(arm):
        message = (
            f"not tried, because {first.run_id} ran out of memory with the same settings; --resume tries it again"
        )
        return decline_run(context, planned, directory, RunFailure(cause="infeasible", message=message))
    record = measure_run(context, planned, directory)
    if record.failure is not None and record.failure.cause == OUT_OF_MEMORY:
        infeasible[arm] = record
    return record


def _doubt_version(results: ResultDirectory, noise: NoiseFloor | None, record: RunRecord) -> None:
    """Tell, once, that the noise on file is that of another version of the engine: only its servers say theirs."""
    doubt = None if noise is None else version_doubt(noise, record.engine_version)
    manifest = results.manifest()
    if doubt is not None and doubt not in manifest.warnings:
        results.write_manifest(msgspec.structs.replace(manifest, warnings=(*manifest.warnings, doubt)))


def _is_done(directory: RunDirectory) -> bool:
    """Whether the run says so; one whose ``run.json`` cannot be read is done again, beside what it left."""
    try:
        return (directory.path / "run.json").is_file() and directory.read().state == "done"
    except RecordError:
        return False


def _count(outcome: Outcome, state: RunState) -> Outcome:
    if state == "done":
        return replace(outcome, num_done=outcome.num_done + 1)
    if state == "suspect":
        return replace(outcome, num_suspect=outcome.num_suspect + 1)
    return replace(outcome, num_failed=outcome.num_failed + 1)


def _final_state(outcome: Outcome) -> RunState:
    if outcome.num_failed:
        return "failed"
    return "suspect" if outcome.num_suspect else "done"


def _set_state(results: ResultDirectory, state: RunState) -> None:
    results.write_manifest(msgspec.structs.replace(results.manifest(), state=state))
