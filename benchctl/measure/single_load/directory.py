"""The result directory of a single load: everything that is known before it is sent."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchctl.errors import UsageError
from benchctl.measure.latest import point_latest
from benchctl.measure.provenance import directory_name, new_manifest
from benchctl.profile.load import dump_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning.plan import plan_runs
from benchctl.records.directory import ResultDirectory
from benchctl.workload.prepare import PreparedSet

_NAMES_PER_SECOND: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrigin:
    """Where the result goes and where it comes from; without a ``directory`` a new one is made in ``root``."""

    root: Path
    directory: Path | None
    argv: tuple[str, ...]


def create_load_directory(profile: Profile, prepared: PreparedSet, origin: LoadOrigin) -> ResultDirectory:
    """Write everything that is known before the load. Raises UsageError where no directory can be made."""
    manifest = msgspec.structs.replace(new_manifest(profile, prepared, origin.argv), state="running")
    path = _new_directory(origin, profile.name, directory_name(manifest))
    results = ResultDirectory(path)
    results.write_profile(dump_profile(profile))
    results.write_prepared_requests(prepared.content)
    results.write_plan(plan_runs(profile))
    results.write_manifest(manifest)  # last, because it makes the directory one of results
    if origin.directory is None:
        point_latest(path)
    return results


def _new_directory(origin: LoadOrigin, name: str, stem: str) -> Path:
    chosen = origin.directory
    paths = [chosen] if chosen is not None else _names(origin.root / name, stem)
    try:
        for path in paths:
            path.mkdir(parents=True, exist_ok=path == chosen)
            if any(path.iterdir()):
                raise UsageError(f"{path}: is not empty; name a new directory in --output-dir, or leave it out")
            return path
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; choose another --output-dir") from error
    raise UsageError(f"{origin.root / name / stem}: a thousand directories of this name; name one in --output-dir")


def _names(parent: Path, stem: str) -> Iterator[Path]:
    """Names that are free: ``stem``, with a number behind it where two loads start in one second."""
    numbered = (parent / (stem if number == 1 else f"{stem}-{number}") for number in range(1, _NAMES_PER_SECOND))
    return (path for path in numbered if not path.exists())
