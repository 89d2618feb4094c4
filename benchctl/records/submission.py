"""One submission of blocks to a scheduler: ``submissions/<utc>/submission.json``."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.errors import RecordError
from benchctl.records.jsonl import document_bytes
from benchctl.records.record import Record
from benchctl.untrusted.decoding import DECODING_ERRORS
from benchctl.untrusted.files import entry_names, read_file
from benchctl.untrusted.writing import replace_file

SUBMISSIONS: Final = "submissions"
"""Folder of a result directory."""
_FILE: Final = "submission.json"


class Submission(Record, frozen=True, kw_only=True):
    """Blocks that were handed to a scheduler at once."""

    schema_version: int
    """Version of the result format."""
    job: str
    """Number of the array job, or of the job of a single block."""
    tasks: dict[str, int]
    """Block of each task, by the scheduler's name of the task: ``17_0``."""
    submitted_at: str
    """UTC, ISO 8601."""
    argv: tuple[str, ...]
    """The command, without secrets."""
    cluster: dict[str, Any]
    """The settings of ``cluster`` that it used."""


def write_submission(results: Path, folder: Path, submission: Submission) -> None:
    """Store what was submitted beside its tasks' logs. Raises OSError."""
    replace_file(folder / _FILE, document_bytes(submission), within=results)


def read_submissions(results: Path) -> tuple[Submission, ...]:
    """All submissions of a directory, oldest first; those that cannot be read are left out."""
    submissions = list[Submission]()
    try:
        names = sorted(entry_names(results / SUBMISSIONS, within=results))
    except (OSError, RecordError):
        return ()
    for name in names:
        with suppress(OSError, RecordError, *DECODING_ERRORS):
            content = read_file(results / SUBMISSIONS / name / _FILE, within=results)
            submissions.append(msgspec.json.decode(content, type=Submission))
    return tuple(submissions)
