"""Result directories fetched from another machine by rsync over ssh: again, only what changed is fetched.

The remote machine may send anything: no links or devices are received, no name leads out of the destination, and
what came is compared with its digests. Secrets, copies and files that are being written stay where they are.
"""

import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.cluster.arrival import default_destination, require_same_experiment
from benchctl.cluster.rsync import Rsync
from benchctl.errors import InvalidDataError, RecordError, UsageError
from benchctl.records.archive import contents_of
from benchctl.records.claims.claims import current_manifest
from benchctl.records.directory import ResultDirectory, open_results
from benchctl.records.integrity.integrity import Verification, verify_directory
from benchctl.records.record import Manifest

_MOST_PASSES: Final = 3
_ADDRESS: Final = re.compile(
    r"(?:[^\s:@/\\-][^\s:@/\\]*@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:@/\\\[\]-][^\s:@/\\\[\]]*)"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A directory of another machine."""

    host: str
    """Host as ssh knows it, with a user before ``@`` or without."""
    path: str

    def __str__(self) -> str:
        return f"{self.host}:{self.path}"

    @property
    def remote_path(self) -> str:
        """The path for rsync, which expands no ``~`` and would take ``-x`` for an option."""
        path = self.path.rstrip("/") or "/"
        if path == "~" or path.startswith("~/"):
            path = f"./{path[2:]}"
        return f"./{path}" if path.startswith(("-", "~")) else path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A directory that was fetched."""

    path: Path
    received_bytes: int
    """Bytes of files that were sent, not counting what was here."""
    verified: Verification
    num_done: int
    num_planned: int
    running: tuple[str, ...]
    """Runs that were being measured when they were fetched."""
    is_running: bool
    """The experiment was being measured, as far as its manifest says."""


def parse_source(text: str) -> Source:
    """The source of ``HOST:DIR``. Raises UsageError for anything else."""
    host, colon, path = text.partition(":")
    if text.startswith("["):  # an address of IPv6
        host, colon, path = text.partition("]:")
        host += "]" if colon else ""
    if not colon or path.startswith((":", "//")) or not path or not _ADDRESS.fullmatch(host):
        raise UsageError(
            f"{text!r} is not HOST:DIR: write the host as for ssh, a colon and the directory there, for example "
            "login.cluster:results/topk-sweep/latest"
        )
    if "\n" in path or "\0" in path:
        raise UsageError(f"{text!r} has a line feed in its path; name another one, such as a link to the directory")
    return Source(host, path)


def pull(
    source: Source, destination: Path | None, root: Path, rsync: Rsync, on_destination: Callable[[Path], None]
) -> Pulled:
    """Fetch a directory and verify it; ``destination`` None is where ``benchctl run`` below ``root`` puts it.

    ``on_destination`` is told where, before anything is written there. Raises UsageError where the source cannot be
    reached or is not a result directory, and where the destination holds something else; what came stays after any
    error.
    """
    manifest = _remote_manifest(source, rsync)
    destination = destination or default_destination(manifest, source.name, root)
    require_same_experiment(destination, manifest)
    on_destination(destination)
    if not (destination / "manifest.json").exists():
        ResultDirectory(destination).write_manifest(manifest)  # first, so that what is cut short is known again
    remote = f"{source.host}:{source.remote_path}/"
    received, verified = 0, None
    for number in range(_MOST_PASSES):
        # Files of one size and time are compared by content where digests say that something differs.
        received += rsync.copy(remote, destination, compares_contents=number > 0)
        _require_regular(destination)
        verified = _verified(destination)
        if verified is not None and not verified.alterations:
            break
        if number and not _is_running(destination):
            break  # nothing changes there, and this is what is there
    return _pulled(destination, received, verified or verify_directory(destination, is_fresh=True))


def _remote_manifest(source: Source, rsync: Rsync) -> Manifest:
    with tempfile.TemporaryDirectory(prefix="benchctl-pull-") as made:
        rsync.fetch(f"{source.host}:{source.remote_path}/manifest.json", Path(made))
        try:
            return ResultDirectory(Path(made)).manifest()
        except RecordError as error:
            raise RecordError(f"{source}: {error}") from error


def _require_regular(destination: Path) -> None:
    if irregular := contents_of(destination).irregular:
        raise RecordError(
            f"{destination / irregular[0]} is not a regular file, and no result directory has one; remove it"
        )


def _verified(destination: Path) -> Verification | None:
    """The verification; None where documents cannot be read, perhaps because they changed while they came."""
    try:
        return verify_directory(destination, is_fresh=True)
    except InvalidDataError:
        return None


def _is_running(destination: Path) -> bool:
    with suppress(InvalidDataError):
        results = ResultDirectory(destination)
        return "running" in (results.manifest().state, current_manifest(results).state)  # of others, and of claims
    return True


def _pulled(destination: Path, received_bytes: int, verified: Verification) -> Pulled:
    results = open_results(destination)
    states = {}
    for run in results.begun_runs(results.due_plan()):
        with suppress(InvalidDataError):
            states[run.path.name] = run.read().state
    return Pulled(
        path=destination,
        received_bytes=received_bytes,
        verified=verified,
        num_done=sum(state == "done" for state in states.values()),
        num_planned=len(results.due_plan().runs),
        running=tuple(run_id for run_id, state in states.items() if state == "running"),
        is_running=_is_running(destination),
    )
