"""Result directories on disk: created whole, and reopened unchanged."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchctl.errors import NotComparableError, RecordError, UsageError
from benchctl.profile.load import dump_profile, profile_sha256, stored_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import ResultDirectory, open_results
from benchctl.records.files import write_json_atomic
from benchctl.records.integrity import begin_digests, digest_of, read_digests
from benchctl.records.peaks import PEAKS, MeasuredPeaks
from benchctl.records.record import Manifest, PreparedRequest
from benchctl.records.schema import ExperimentState
from benchctl.records.stores import NOISE, NoiseFloor
from benchctl.workload.prepare import PreparedSet

_NAME_IN_USE: Final = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
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
        results.write_prepared_requests(prepared.content)
        results.write_plan(plan_runs(profile))
        if noise is not None:
            write_json_atomic(path / NOISE.file, noise)
        if peaks is not None:
            write_json_atomic(path / PEAKS.file, peaks)
        results.write_manifest(manifest)  # late, because it makes the directory one of results
        begin_digests(results)
        finished = finish()
    if origin.directory is None:
        _point_latest(finished)
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
                if error.errno not in _NAME_IN_USE:
                    raise
        raise UsageError(f"{parent / stem}: a thousand directories of this name; choose another --output-dir")

    try:
        yield unfinished, finish
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _point_latest(path: Path) -> None:
    """Let ``latest`` beside the result directory ``path`` name it, for people who type paths."""
    link = path.with_name(".latest.partial")
    # A file system without links only costs the convenience.
    with suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(path.name, target_is_directory=True)
        link.replace(path.with_name("latest"))


def set_state(results: ResultDirectory, state: ExperimentState) -> None:
    results.write_manifest(msgspec.structs.replace(results.manifest(), state=state))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenedExperiment:
    """A result directory whose experiment continues, with exactly what it began with."""

    results: ResultDirectory
    profile: Profile
    requests: tuple[PreparedRequest, ...]


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
    profile_path, requests_path = path / "profile.yaml", path / "requests.jsonl"
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
    if digest_of(requests_path, within=path).sha256 != manifest.request_set_sha256:
        raise _altered(requests_path)
    results.begun_runs(results.plan())  # refuses a run whose directory is a link, before anything is measured
    digests, plan_path = read_digests(path), path / "plan.json"
    recorded = None if digests is None else digests.files.get(plan_path.name)  # older directories have none
    if recorded is not None and recorded.sha256 != digest_of(plan_path, within=path).sha256:
        raise _altered(plan_path)
    return ReopenedExperiment(results=results, profile=stored, requests=tuple(results.prepared_requests()))


def _altered(path: Path) -> RecordError:
    return RecordError(f"{path} was changed since the experiment began; restore it, or start a new one")
