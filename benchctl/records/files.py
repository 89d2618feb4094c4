"""Files of a result directory: read with the location of any damage, replaced or appended to in one step."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec

from benchctl.errors import OWN_LIMITS, RecordError, system_failure
from benchctl.records.schema import check_version
from benchctl.untrusted import DOCUMENT_BYTES, LINE_BYTES
from benchctl.untrusted.files import (
    DECODING_ERRORS,
    decoding_problem,
    field_problem,
    open_file,
    open_to_append,
    read_file,
    replace_file,
)

_BLOCK_BYTES: Final = 1 << 20
"""Records take many times the memory of their lines."""


@contextmanager
def _told_by_path(path: Path) -> Iterator[None]:
    """RecordError for a file that cannot be read, unless it is missing or a limit of this process refuses it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        failure = system_failure(error)
        if failure is not None and failure.cause in OWN_LIMITS:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise RecordError(
            f"{path} cannot be read: {error.strerror}; correct its permissions, or copy the directory again"
        ) from error


def read_if_there(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes | None:
    """The content of a document; None without one. Raises RecordError when it cannot be read."""
    with suppress(FileNotFoundError), _told_by_path(path):
        return read_file(path, within=within, max_bytes=max_bytes)
    return None


def read_document(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a document. Raises RecordError when it is missing or cannot be read."""
    content = read_if_there(path, within=within, max_bytes=max_bytes)
    if content is None:
        raise RecordError(f"{path} is missing: the result directory is incomplete; copy it again whole")
    return content


def is_name(name: str) -> bool:
    """True if ``name`` is one component of a path on any system."""
    is_plain = name not in {"", ".", ".."} and not any(character in name for character in "/\\\0")
    return is_plain and len(name.encode(errors="surrogatepass")) <= 255


R = TypeVar("R")

_encoder = msgspec.json.Encoder(order="deterministic")


def encode(record: object) -> bytes:
    """One record as canonical JSON: fields in their order, keys of mappings sorted; equal means byte-equal."""
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        return _encoder.encode(encodable(record))


def encodable(value: object) -> object:
    r"""A document as plain values without lone surrogates, which no file can hold.

    They stand for bytes that are no text, as in a name of a file, and become escapes such as ``\udcff``.
    """
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        return {encodable(key): encodable(part) for key, part in plain.items()}
    if isinstance(plain, list | tuple):
        return [encodable(part) for part in plain]
    return plain.encode("utf-8", "backslashreplace").decode() if isinstance(plain, str) else plain


class JsonlWriter:
    """Appends records to a file, one line and one flush each, so that a crash costs at most a torn last line.

    No link leads the path out of ``within``, by default the folder of the file.
    """

    def __init__(self, path: Path, *, within: Path | None = None) -> None:
        self.path = path
        self._file = open_to_append(path, within=within or path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def write(self, record: msgspec.Struct) -> None:
        self._file.write(encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_json_atomic(path: Path, record: object, *, within: Path | None = None) -> None:
    """Replace ``path`` in one step: a reader sees the old document or the new one, never a part."""
    write_bytes_atomic(path, document_bytes(record), within=within)


def document_bytes(record: object) -> bytes:
    """One record as a document for readers: indented canonical JSON."""
    return msgspec.json.format(encode(record), indent=1) + b"\n"


def write_bytes_atomic(path: Path, content: bytes, *, within: Path | None = None, is_derived: bool = False) -> None:
    """Replace ``path`` in one step with ``content``, on disk before the name changes unless it ``is_derived``.

    No link leads the path out of ``within``, by default its folder, which the user named. Raises RecordError where
    a directory of that name is ``within`` one.
    """
    try:
        replace_file(path, content, within=within or path.parent, is_derived=is_derived)
    except IsADirectoryError as error:
        if within is None:
            raise
        raise RecordError(f"{path} is a directory, and a file belongs in its place; move it away") from error


def read_jsonl(path: Path, kind: type[R], *, within: Path | None = None) -> Iterator[R]:
    """Yield the records of a file, to which no link leads from ``within``, by default its folder.

    Raises RecordError naming file and line at the first damaged line; the records before it have been
    yielded by then. A missing file has no records.
    """
    decoder, num_lines = msgspec.json.Decoder(kind), 0
    for lines in line_blocks(path, within=within or path.parent):
        records, damage = records_in(lines, decoder, path, num_lines)
        yield from records
        if damage is not None:
            raise damage
        num_lines += lines.count(b"\n")


def line_blocks(path: Path, *, within: Path) -> Iterator[bytes]:
    """Whole lines of a file, a megabyte at a time. Raises RecordError when it cannot be read."""
    with suppress(FileNotFoundError), _told_by_path(path), open_file(path, within=within) as file:
        while lines := file.read(_BLOCK_BYTES) + file.readline(LINE_BYTES + 1):
            yield lines


def records_in(
    lines: bytes, decoder: msgspec.json.Decoder[R], path: Path, num_before: int
) -> tuple[list[R], RecordError | None]:
    """The records of a block up to its first damaged line, and its error; ``num_before`` lines precede them."""
    with suppress(*DECODING_ERRORS):
        records = decoder.decode_lines(lines)  # all at once takes a third of the time
        if records and len(records) == lines.count(b"\n"):
            return records, None
    return _read_singly(lines, path, decoder, num_before + 1)


def _read_singly(
    lines: bytes, path: Path, decoder: msgspec.json.Decoder[R], first_line: int
) -> tuple[list[R], RecordError | None]:
    """The records of a block with empty lines, or up to its first damaged one, and the error of that."""
    records: list[R] = []
    for number, line in enumerate(io.BytesIO(lines), start=first_line):
        if len(line) > LINE_BYTES:
            problem = f"the line is longer than {LINE_BYTES / 1e6:.0f} MB, which no record is"
            return records, damaged_line(path, number, problem)
        try:
            if line.strip():
                records.append(decoder.decode(line))
        except DECODING_ERRORS as error:
            problem = decoding_problem(error)
            with suppress(*DECODING_ERRORS):
                problem = field_problem(error, msgspec.json.decode(line, type=dict[str, Any]))
            problem = problem if line.endswith(b"\n") else f"the line is cut off ({problem})"
            beginning = line[:60].decode(errors="replace").rstrip("\n")
            return records, damaged_line(path, number, f"{problem}; it begins {beginning!r}")
    return records, None


def damaged_line(path: Path, number: int, problem: str) -> RecordError:
    """The error for line ``number`` (from 1) of a file of records."""
    return RecordError(
        f"{path}:{number}: {problem}. "
        "Run the experiment again with --resume after deleting this run's directory, or remove the line"
    )


RESTORE: Final = "restore the file from a copy, or run the experiment again"


def read_record(path: Path, kind: type[R], *, within: Path, remedy: str = RESTORE) -> R:
    """The record in a file. Raises as ``read_document`` and ``record_of`` do."""
    return record_of(read_document(path, within=within), path, kind, remedy=remedy)


def record_of(content: bytes, path: Path, kind: type[R], *, remedy: str = RESTORE) -> R:
    """The record in a document.

    Raises RecordError with ``remedy`` when it is damaged, SchemaVersionError when it is of another schema.
    """
    document = document_of(content, path, remedy=remedy)
    check_version(document, path)
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
