"""Result directories that come from elsewhere as archives, and where they lie here."""

import os
import shutil
import tempfile
from pathlib import Path

from benchctl.errors import RecordError, UsageError
from benchctl.records.archive import is_archive, unpack_results
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import is_name
from benchctl.records.record import Manifest


def default_destination(manifest: Manifest, name: str, root: Path) -> Path:
    """The directory of an experiment as ``benchctl run`` would choose it: ``<root>/<profile>/<name>``.

    Where ``name`` names no directory, such as ``latest``, it is made of time and profile. Raises RecordError for a
    manifest whose profile names none.
    """
    chosen = name if _names_a_directory(name) and name != "latest" else manifest.directory_name
    for part in (manifest.profile, chosen):
        if not _names_a_directory(part):
            raise RecordError(f"the manifest has {part[:60]!r}, which names no directory here; name DEST yourself")
    return root / manifest.profile / chosen


def import_archive(archive: Path, output: Path | None, root: Path) -> Path:
    """Make a directory of an archive, ``output`` or one below ``root``; returns it.

    Raises UsageError for a file that is not an archive of results, and where the destination is taken, RecordError
    for a damaged archive.
    """
    if not is_archive(archive) or archive.is_dir():
        problem = "is a directory already" if archive.is_dir() else "is not called as an archive is, x.tar.gz"
        raise UsageError(f"{archive} {problem}; name a file that 'benchctl export DIR --archive FILE' wrote")
    made_in = output.absolute().parent if output is not None else root
    made_in.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=made_in) as made:
        content = Path(made) / "content"
        content.mkdir()
        unpacked = unpack_results(archive, content)
        name = archive.name.partition(".")[0] if unpacked == content else unpacked.name
        destination = output or default_destination(ResultDirectory(unpacked).manifest(), name, root)
        if destination.exists() and not (destination.is_dir() and _is_new(destination)):
            raise UsageError(f"{destination} is there already; name another directory with --output")
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists():
            destination.rmdir()
        shutil.move(unpacked, destination)
    return destination


def _names_a_directory(name: str) -> bool:
    return is_name(name) and name.isprintable() and name[0] not in ".-~"


def _is_new(destination: Path) -> bool:
    """True for a directory without any entry that can be seen."""
    return not any(not name.startswith(".") for name in os.listdir(destination))  # noqa: PTH208 - names alone
