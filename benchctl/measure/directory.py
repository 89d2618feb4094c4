"""Result directories: created whole, reopened unchanged, extended by blocks; attempts at their runs.

What an earlier attempt at a run left is moved aside, never mixed with the new one and never deleted. Blocks are
added to the plan of an experiment that lacks some; the runs until then keep their names, blocks and positions.
Because results may have been seen, every extension is one more look at the data, by which all intervals are
corrected (``analysis/experiment/looks.py``).
"""

import datetime as dt
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchctl.errors import BenchctlError, NotComparableError, RecordError, UsageError
from benchctl.measure.interrupt import noting_interrupt
from benchctl.profile.checks import MAX_RUNS
from benchctl.profile.choices import NO_REQUESTS
from benchctl.profile.load import dump_profile, profile_sha256, stored_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import extend_plan, plan_runs
from benchctl.records.directory import RequestSets, ResultDirectory, RunDirectory, open_results
from benchctl.records.files import write_json_atomic
from benchctl.records.integrity import begin_digests, digest_of, read_digests, renew_digests
from benchctl.records.peaks import PEAKS, MeasuredPeaks
from benchctl.records.record import Extension, Manifest, Plan, PlannedRun, RunRecord
from benchctl.records.schema import ExperimentState
from benchctl.records.stores import NOISE, NoiseFloor
from benchctl.records.writers import sole_writer
from benchctl.untrusted.files import entry_names, make_folder, move_entry
from benchctl.workload.prepare import PreparedSet

_MOST_NUMBERED: Final = 999
"""Directories of one name, told apart by a number; each name holds the second in which it was created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Destination and origin of a result, apart from its profile.

    Without a ``directory`` of its own it gets a new one below ``output_root``.
    """

    output_root: Path
    argv: tuple[str, ...]
    label: str | None = None
    directory: Path | None = None
    is_elsewhere: bool = False
    """Other machines measure than the one that creates the directory."""


def create_results(
    profile: Profile,
    prepared: PreparedSet,
    origin: Origin,
    manifest: Manifest,
    noise: NoiseFloor | None = None,
    peaks: MeasuredPeaks | None = None,
) -> ResultDirectory:
    """Write everything that is known before the first run; returns the new directory.

    Raises UsageError where the directory cannot be created, or where ``origin.directory`` is not empty.
    """
    with _new_directory(origin, profile.name, manifest.directory_name) as (path, finish):
        results = ResultDirectory(path)
        results.write_profile(dump_profile(profile))
        for each, listed in zip((prepared, *prepared.others), manifest.all_sets, strict=True):
            results.write_prepared_requests(each.content, listed.file)
        results.write_plan(plan_runs(profile))
        if noise is not None:
            write_json_atomic(path / NOISE.file, noise)
        if peaks is not None:
            write_json_atomic(path / PEAKS.file, peaks)
        results.write_manifest(manifest)  # late, because it makes the directory one of results
        begin_digests(results)
        finished = finish()
    if origin.directory is None:
        # A simulation beside a measurement must not be taken for it.
        _point(finished.with_name("latest-simulated" if manifest.is_simulated else "latest"), finished)
    return ResultDirectory(finished)


@contextmanager
def _new_directory(origin: Origin, name: str, stem: str) -> Iterator[tuple[Path, Callable[[], Path]]]:
    """Yields a new directory, and the function that gives it its final name and returns that."""
    if origin.directory is None:
        with renamed_when_complete(origin.output_root / name, stem) as unfinished:
            yield unfinished
        return
    path = origin.directory
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(
                f"{path}: is not empty; --output names the result directory itself, which is new or empty; for "
                "its parent there is --output-dir"
            )
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; choose another --output") from error
    yield path, lambda: path


@contextmanager
def renamed_when_complete(parent: Path, stem: str) -> Iterator[tuple[Path, Callable[[], Path]]]:
    """A directory that gets its name when it is complete: an interrupt leaves none that cannot be resumed.

    Two results of one second get a number behind ``stem``.
    """
    unfinished = parent / f".{stem}.{os.getpid()}.partial"
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"{parent}: result directories cannot be created there ({error.strerror}); choose another --output-dir"
        ) from error

    def finish() -> Path:
        for number in range(1, _MOST_NUMBERED + 1):
            path = parent / (stem if number == 1 else f"{stem}-{number}")
            try:
                return unfinished.rename(path)
            except OSError as error:
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                    raise
        raise UsageError(f"{parent / stem}: a thousand directories of this name; choose another --output-dir")

    try:
        yield unfinished, finish
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _point(link: Path, directory: Path) -> None:
    """Let ``link`` name the result directory beside it, for people who type paths."""
    unfinished = link.with_name(f".{link.name}.partial")
    # A file system without links only costs the convenience.
    with suppress(OSError):
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(directory.name, target_is_directory=True)
        unfinished.replace(link)


def set_state(results: ResultDirectory, state: ExperimentState) -> None:
    results.write_manifest(msgspec.structs.replace(results.manifest(), state=state))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenedExperiment:
    """A result directory whose experiment continues, with exactly what it began with."""

    results: ResultDirectory
    profile: Profile
    requests: RequestSets


def reopen_experiment(path: Path, profile: Profile | None) -> ReopenedExperiment:
    """Reopen a directory for resuming; the number of blocks of ``profile`` does not matter, that of the plan does.

    Raises NotComparableError when ``profile`` is given and is not the one the directory began with, and
    RecordError when the stored profile, plan or request set was changed since.
    """
    if path.is_symlink():  # ``latest`` will name another directory when the next experiment begins
        path = path.parent / path.readlink()
    results = open_results(path)
    manifest = results.manifest()
    if manifest.imported is not None:
        raise UsageError(f"{path} was imported from {manifest.imported.source}: there is nothing to resume")
    profile_path = path / "profile.yaml"
    stored = stored_profile(results.profile_yaml(), str(profile_path), is_to_send=True)
    if profile is not None and profile_sha256(
        profile.model_copy(update={"blocks": stored.blocks})
    ) != profile_sha256(stored):
        raise NotComparableError(
            f"{path} was begun with another profile: its sha256 is {profile_sha256(stored)[:12]}…, that of "
            f"{profile.name!r} as given now is {profile_sha256(profile)[:12]}…. Resume without --profile and --set "
            "to continue with the stored one, or start a new experiment"
        )
    if profile_sha256(stored) != manifest.profile_sha256:
        raise _altered(profile_path)
    for each in manifest.all_sets:
        if digest_of(path / each.file, within=path).sha256 != each.sha256:
            raise _altered(path / each.file)
    results.begun_runs(results.plan())  # refuses a run whose directory is a link, before anything is measured
    digests, plan_path = read_digests(path), path / "plan.json"
    recorded = None if digests is None else digests.files.get(plan_path.name)  # older directories have none
    if recorded is not None and recorded.sha256 != digest_of(plan_path, within=path).sha256:
        raise _altered(plan_path)
    return ReopenedExperiment(results=results, profile=stored, requests=results.request_sets())


def _altered(path: Path) -> RecordError:
    return RecordError(f"{path} was changed since the experiment began; restore it, or start a new one")


def begin_attempt(directory: RunDirectory) -> int:
    """Make room for a new attempt; returns its number, from 1.

    The files of the previous one move into ``attempt-<n>/`` inside the run's directory.
    """
    path, root = directory.path, directory.root
    make_folder(path, within=root)
    names = entry_names(path, within=root)
    earlier = {name: int(match[1]) for name in names if (match := re.fullmatch(r"attempt-(\d+)", name))}
    number, files = max(earlier.values(), default=0) + 1, [name for name in names if name not in earlier]
    if not files:
        return number
    with suppress(BenchctlError):  # ``run.json`` is missing or damaged
        number = max(directory.read().attempt, number)
    aside = path / f"attempt-{number}"
    make_folder(aside, within=root)
    for name in files:
        move_entry(path / name, aside / name, within=root)
    return number + 1


def why_not_extended(manifest: Manifest) -> str | None:
    """The reason why no blocks can be added to an experiment; None where they can."""
    if manifest.stopping is not None:
        return (
            "its stopping rule declared the looks and the most blocks before the first run, and more would break "
            "the promise of its intervals; begin a new experiment with more --blocks"
        )
    if manifest.imported is not None:
        return "it was imported; measure a new experiment"
    if manifest.is_simulated:
        return "its runs were simulated in virtual time; simulate it again with more --blocks"
    if manifest.dataset == NO_REQUESTS:
        return "it measures forward passes, which 'benchctl micro' measures anew in seconds"
    return None


def extended_plan(reopened: ReopenedExperiment, num_blocks: int) -> Plan:
    """The plan of an experiment with blocks added until it has ``num_blocks``; nothing is written.

    Raises UsageError for fewer blocks than there are, and for an experiment that cannot grow.
    """
    results = reopened.results
    manifest, plan = results.manifest(), results.plan()
    if num_blocks == manifest.blocks:
        return plan
    if num_blocks < manifest.blocks:
        raise UsageError(
            f"{results.path} has {manifest.blocks} blocks, and --blocks {num_blocks} would be fewer; blocks "
            f"are only added: give a number above {manifest.blocks}, or leave --blocks out"
        )
    if reason := why_not_extended(manifest):
        raise UsageError(f"{results.path}: no blocks can be added: {reason}")
    if (num_runs := len(plan.runs) // manifest.blocks * num_blocks) > MAX_RUNS:
        raise UsageError(f"--blocks {num_blocks} makes {num_runs:,} runs, more than {MAX_RUNS:,}; lower it")
    return extend_plan(plan, reopened.profile, num_blocks)


def extend_experiment(reopened: ReopenedExperiment, num_blocks: int) -> Extension | None:
    """Add blocks to an experiment until it has ``num_blocks``; None where its plan has as many already.

    Raises UsageError as ``extended_plan`` does.
    """
    results = reopened.results
    with sole_writer(results.path):
        manifest, plan = results.manifest(), results.plan()
        longer = extended_plan(reopened, num_blocks)
        if num_blocks == manifest.blocks:
            return None
        extension = Extension(
            extended_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            from_blocks=manifest.blocks,
            to_blocks=num_blocks,
            num_done=len(plan.runs) - len(undone_runs(results, plan)),
            num_looks=len(manifest.extensions) + 2,
        )
        extended = msgspec.structs.replace(
            manifest, blocks=num_blocks, extensions=(*manifest.extensions, extension)
        )
        with noting_interrupt():  # the files agree with each other before a signal ends us
            results.write_plan(longer)
            results.write_manifest(extended)
            renew_digests(results)
    return extension


def undone_runs(results: ResultDirectory, plan: Plan | None = None) -> tuple[PlannedRun, ...]:
    """The runs of ``plan`` that are not done, in its order.

    By default it is that of ``results`` without blocks that a stopping rule made unnecessary. A run with an
    unreadable ``run.json`` is not done.
    """
    runs = (plan or results.due_plan()).runs
    done = dict(done_runs(results, runs))
    return tuple(planned for planned in runs if planned.run_id not in done)


def done_runs(results: ResultDirectory, runs: Sequence[PlannedRun]) -> Iterator[tuple[str, RunRecord]]:
    """The id and the record of each of these runs that is done; one with an unreadable record is not."""
    for planned in runs:
        with suppress(RecordError):  # a run with an unreadable record is measured again
            directory = results.run(planned.run_id)
            if directory.is_begun() and (record := directory.read()).state == "done":
                yield planned.run_id, record
