"""The result directories under a root, newest first.

Anything else, and whatever cannot be read, is an entry that says so: a listing never fails because of other files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchctl.errors import InvalidDataError, RecordError, UsageError
from benchctl.formats import first_of
from benchctl.records.claims import current_manifest
from benchctl.records.directory import ResultDirectory, RunDirectory, open_results
from benchctl.records.integrity import verify_directory
from benchctl.records.record import RunRecord
from benchctl.untrusted.files import OutsideError, is_there

DAMAGED: Final = "damaged"
"""State of a directory with a document that cannot be read, in place of the one that its manifest has."""


_NAMES: Final = (
    *("path", "created_at", "profile", "engine", "state", "label", "num_done", "num_planned", "num_blocks_done"),
    *("num_blocks", "nodes", "problem", "damage", "altered"),
)


def list_directories(root: Path) -> tuple[dict[str, Any], ...]:
    """Result directories in ``root`` and one level below it, newest first, unreadable ones last.

    What is unknown of one is None; ``nodes`` are those that measured runs, as far as records name them; ``problem``
    says why nothing else of it can be read, ``damage`` why a run cannot, ``altered`` what is not as measured.

    Raises UsageError when ``root`` is not a directory.
    """
    if not root.is_dir():
        raise UsageError(
            f"{root} is not a directory; name the one that holds results, or measure with 'benchctl run'"
        )
    unknown = dict.fromkeys(_NAMES) | {"nodes": ()}
    entries = [unknown | {"path": str(path)} | _entry(path) for path in _candidates(root)]
    readable = sorted(
        (entry for entry in entries if entry["problem"] is None),
        key=lambda entry: (entry["created_at"] or "", entry["path"]),
        reverse=True,
    )
    return (*readable, *(entry for entry in entries if entry["problem"] is not None))


def _candidates(root: Path) -> Iterator[Path]:
    """The root itself when it is a result directory, else its children or their children."""
    if _is_result(root):
        yield root
        return
    for child in _directories(root):
        below = [] if _is_result(child) else _directories(child)
        if below and any(_is_result(path) for path in below):
            yield from below
        else:
            yield child


def _is_result(path: Path) -> bool:
    try:
        return is_there(path / "manifest.json", within=path)
    except (OSError, OutsideError):
        return False


def _directories(path: Path) -> list[Path]:
    try:
        children = [child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        return []
    return sorted(child for child in children if not child.is_symlink())  # ``latest`` links to one of the others


def _entry(path: Path) -> dict[str, Any]:
    try:
        return _entry_of(open_results(path))
    except UsageError:
        return {"problem": "not a result directory"}
    except OSError as error:
        return {"problem": f"{path} cannot be read: {error.strerror}; correct its permissions"}
    except RecordError as error:
        return {"state": DAMAGED, "problem": str(error)}
    except InvalidDataError as error:
        return {"problem": str(error)}


def _entry_of(results: ResultDirectory) -> dict[str, Any]:
    manifest = current_manifest(results)
    plan = results.due_plan()
    records = [_read(results.run(planned.run_id)) for planned in plan.runs]
    readable = [record for record in records if isinstance(record, RunRecord)]
    done = {record.run_id for record in readable if record.state == "done"}
    damage = next((str(record) for record in records if isinstance(record, RecordError)), None)
    altered = list(dict.fromkeys(alteration.file for alteration in verify_directory(results.path).alterations))
    return {
        "path": str(results.path),
        "created_at": manifest.created_at,
        "profile": manifest.profile,
        "engine": manifest.engine,
        "state": manifest.state if damage is None else DAMAGED,
        "label": manifest.label,
        "num_done": sum(record.state == "done" for record in readable),
        "num_planned": len(plan.runs),
        "num_blocks_done": plan.num_blocks_of(done),
        "num_blocks": len({planned.block for planned in plan.runs}),
        "nodes": tuple(sorted({record.node.name for record in readable if record.node is not None})),
        "damage": damage,
        "altered": "altered: " + first_of(altered, 2) if altered else None,
    }


def _read(run: RunDirectory) -> RunRecord | InvalidDataError | None:
    """The record of a run, None before it has begun, or the reason why it cannot be read."""
    try:
        return run.read() if run.is_begun() else None
    except InvalidDataError as error:
        return error
