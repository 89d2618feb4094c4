"""JSON documents of a result directory: decoded, upgraded and checked; errors name file, field and value."""

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from benchctl.errors import RecordError
from benchctl.records.schema import upgrade
from benchctl.untrusted.decoding import DECODING_ERRORS, decoding_problem, field_problem

T = TypeVar("T", bound=msgspec.Struct)
RESTORE: Final = "restore the file from a copy, or run the experiment again"


def record_of(
    content: bytes, path: Path, kind: type[T], *, remedy: str = RESTORE, first_version: int | None = None
) -> T:
    """The record in a document, brought to the current schema.

    ``first_version`` is that of documents which do not name theirs. Raises RecordError with ``remedy`` when it is
    damaged, SchemaVersionError when it is newer.
    """
    document = document_of(content, path, remedy=remedy)
    if first_version is not None:
        document = {"schema_version": first_version} | document
    document = upgrade(document, path)
    try:
        return msgspec.convert(document, kind)
    except DECODING_ERRORS as error:
        raise RecordError(f"{path}: {field_problem(error, document)}; {remedy}") from error


def document_of(content: bytes, path: Path, *, remedy: str = RESTORE) -> dict[str, Any]:
    """The object in a document as it is. Raises RecordError with ``remedy`` when it holds none."""
    try:
        document: Any = msgspec.json.decode(content)
    except DECODING_ERRORS as error:
        raise RecordError(f"{path}: {decoding_problem(error)}; {remedy}") from error
    if not isinstance(document, dict):
        raise RecordError(f"{path}: expected an object, found {type(document).__name__}; {remedy}")
    return document
