"""How long runs took on this machine: kept on file, so that a plan can say how long its own will take.

    <store>/<engine>.jsonl

The store is the user's, not an experiment's, and nothing that reads results ever looks here. One line for each run
that came to its end; lines of one engine stand in the order in which they were measured.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import platformdirs

from benchctl.records.jsonl import encode

STORE_VARIABLE: Final = "BENCHCTL_DURATIONS_DIR"
_MOST_LINES: Final = 2000
"""Older ones are forgotten, some time after."""


class RunDuration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long one run took, and what says for which others it speaks. Times are in seconds."""

    measured_at: str
    host: str
    gpus: tuple[str, ...] = ()
    engine: str
    model: str
    server_sha256: str
    """Of the options of the run's server."""
    settings_sha256: str
    """Of everything that the run's requests and server were asked for."""
    overhead_s: float
    """Start of the server, warm-up, its end, and the reading of what it left: all but the load."""
    token_s: float
    """From one token of a sequence to the next, prompts included, as the length of the load shows it."""
    num_sequences: int
    """Answers in progress at once, at most."""


def durations_directory() -> Path:
    """``BENCHCTL_DURATIONS_DIR``, or ``durations`` below the user's directory for state."""
    chosen = os.environ.get(STORE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_dir("benchctl")) / "durations"


def store_duration(store: Path, duration: RunDuration) -> None:
    """File a duration. Where it cannot be written the plans of later runs know less, and nothing else is lost."""
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
    """The durations of one engine in the order in which they were measured; lines that are damaged are left out."""
    return tuple(_readable(store / f"{engine}.jsonl"))


def _readable(path: Path) -> Iterator[RunDuration]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=RunDuration)
