"""The checks of neighbours on file: measured on this machine, by server, model and slots.

    <store>/<key>/<when>-<hash>.json

The store belongs to the user. An experiment that runs several blocks at a time gets a copy of the check that
applies to it (``neighbours.json``). The newest check of a key counts; older ones stay as history.
"""

from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.records.stores.stores import (
    NeighbourCheck,
    StoredFile,
    file_measurement,
    find_files,
    key_name,
    path_of,
    read_neighbours,
    store_directory,
    stored_files,
    write_neighbours,
)

STORE_VARIABLE: Final = "BENCHCTL_NEIGHBOURS_DIR"
StoredCheck: TypeAlias = StoredFile[NeighbourCheck]


def neighbours_directory() -> Path:
    """``BENCHCTL_NEIGHBOURS_DIR``, or ``neighbours`` below the data directory of the user."""
    return store_directory(STORE_VARIABLE, "neighbours")


def key_of(check: NeighbourCheck) -> str:
    """``host-engine-model-xN-hash8``: readable, and by its hash unique to a machine, its devices, a server with its
    options, a model, and the number of slots with the devices and cores that each has.
    """
    shapes = tuple((len(slot.gpus), len(slot.cores)) for slot in check.slots)
    identity = (check.host, check.gpus, check.engine, check.engine_sha256, check.model, shapes)
    return key_name((check.host, check.engine, Path(check.model).name, f"x{check.parallel}"), identity)


def store_check(store: Path, check: NeighbourCheck) -> Path:
    """File a check. Raises UsageError when it cannot be written."""
    path = path_of(store, key_of(check), check, check.measured_at)
    write = partial(write_neighbours, check=check)
    return file_measurement(path, write, what="check of neighbours", variable=STORE_VARIABLE)


def stored_checks(store: Path, key: str | None = None) -> tuple[StoredCheck, ...]:
    """Everything on file, or all of one key; see ``stored_files``."""
    return stored_files(store, read_neighbours, key)


def find_checks(store: Path, name: str) -> tuple[StoredCheck, ...]:
    """The checks of ``name``; see ``find_files``."""
    return find_files(stored_checks(store), name, f"check of neighbours is filed under {name!r} in {store}")
