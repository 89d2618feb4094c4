"""Schema versions of the result directory, and the stepwise upgrade of older ones.

History
1  first version
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchctl.errors import RecordError, SchemaVersionError

SCHEMA_VERSION: Final = 1

_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""``_UPGRADES[n]`` turns a document of version n into one of version n + 1."""


def upgrade(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Bring a JSON document to the current schema; a newer one is refused by name.

    Raises RecordError when the version is absent or no number, SchemaVersionError when it is newer.
    """
    version = document.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(
            f"{path}: schema_version is {version!r}, not a positive whole number; "
            "this is no file of a benchctl result directory, or it was edited"
        )
    if version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}, the newest this benchctl reads; "
            "read it with the benchctl that wrote it, or upgrade this one"
        )
    for known in range(version, SCHEMA_VERSION):
        document = _UPGRADES[known](document) | {"schema_version": known + 1}
    return document
