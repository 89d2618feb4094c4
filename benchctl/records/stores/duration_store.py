"""Durations of runs on this machine, from which plans estimate their own.

    <store>/<engine>.jsonl

The store belongs to the user, and readers of results never use it. It has one line for each finished run, in the
order of measurement.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import platformdirs

from benchctl.records.jsonl import encode
from benchctl.records.record import Amount, Count
from benchctl.untrusted.decoding import DECODING_ERRORS
from benchctl.untrusted.reading import UnreadableError, read_lines

STORE_VARIABLE: Final = "BENCHCTL_DURATIONS_DIR"
_MOST_LINES: Final = 2000
"""Limit of a file, which is then cut to the newest half."""


class RunDuration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The duration of one run, and its conditions. Times are in seconds."""

    measured_at: str
    host: str
    gpus: tuple[str, ...] = ()
    engine: str
    model: str
    server_sha256: str
    """SHA-256 of the options of the run's server."""
    settings_sha256: str
    """SHA-256 of all settings of the run's requests and server."""
    overhead_s: Amount
    """Everything but the load: the server's start, warm-up and end, and reading its records."""
    token_s: Amount
    """Time from one token of a sequence to the next, prompts included, from the duration of the load."""
    num_sequences: Count
    """Largest number of answers in progress at once."""


def durations_directory() -> Path:
    """``BENCHCTL_DURATIONS_DIR``, or ``durations`` below the user's directory for state."""
    directory = os.environ.get(STORE_VARIABLE)
    return (
        Path(directory).expanduser() if directory else Path(platformdirs.user_state_dir("benchctl")) / "durations"
    )


def store_duration(store: Path, duration: RunDuration) -> None:
    """Append a duration; a store that cannot be written only makes later estimates worse."""
    path = store / f"{duration.engine}.jsonl"
    with suppress(OSError):
        store.mkdir(parents=True, exist_ok=True)
        if path.is_file() and len(lines := path.read_bytes().splitlines(keepends=True)) > _MOST_LINES:
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.write_bytes(b"".join(lines[-_MOST_LINES // 2 :]))
            partial.replace(path)
        with path.open("ab") as file:
            file.write(encode(duration) + b"\n")


def stored_durations(store: Path, engine: str) -> tuple[RunDuration, ...]:
    """The durations of one engine in the order of measurement; damaged lines are left out."""
    durations: list[RunDuration] = []
    with suppress(UnreadableError):
        for _, line in read_lines(store / f"{engine}.jsonl"):
            with suppress(*DECODING_ERRORS):
                durations.append(msgspec.json.decode(line, type=RunDuration))
    return tuple(durations)
