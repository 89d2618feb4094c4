"""Files of unknown origin: opened, written and found without a link that leads out of their directory, read within
bounds, decoded, and refused in one line where they are not as expected.
"""

import csv
import json
import os
import re
import secrets
import stat
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from benchctl.errors import RecordError, UsageError
from benchctl.untrusted import DOCUMENT_BYTES, LINE_BYTES, LOG_BYTES, PROFILE_BYTES, SEARCHED_ENTRIES, VALUE_CHARS
from benchctl.untrusted.text import visible_line

if TYPE_CHECKING:
    import yaml

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPENDED: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS: Final = {
    "a link": stat.S_ISLNK,
    "a file": stat.S_ISREG,
    "a directory": stat.S_ISDIR,
    "a FIFO": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
}


class OutsideError(RecordError):
    """An entry of a directory leads out of it, or is not a regular file."""


def inside(path: Path, within: Path) -> Path:
    """``path`` itself, an entry of the directory ``within`` or of one below it.

    Raises OutsideError when a folder on the way is a link, ``..`` or no directory; OSError where there is none.
    Not defended: a link that is put there afterwards.
    """
    names = path.parts[len(within.parts) :]  # ``relative_to`` takes as long as all the rest
    if ".." in names or path.parts[: len(within.parts)] != within.parts:
        raise OutsideError(f"{path} leads out of {within}; remove the entry")
    folder = str(within)
    for name in names[:-1]:
        folder = f"{folder}/{name}"  # a Path takes longer than the question
        mode = os.lstat(folder).st_mode
        if not stat.S_ISDIR(mode):
            raise irregular(Path(folder), mode, "directory")
    return path


def irregular(path: Path, mode: int, expected: str = "file") -> OutsideError:
    """The refusal of an entry by its mode, where a ``file`` or a ``directory`` is expected."""
    kind = next((kind for kind, is_kind in _KINDS.items() if is_kind(mode)), "a device")
    return OutsideError(
        f"{path} is {kind}, not a {expected} of this directory; put a copy of the {expected} in its place"
    )


def open_file(path: Path, *, within: Path, max_bytes: int = LOG_BYTES) -> BufferedReader:
    """Open a regular file for reading without leaving the directory ``within``, which holds ``path``.

    Raises OutsideError when an entry on the way is a link, ``..`` or no regular file, RecordError when the file is
    over ``max_bytes``, OSError as ``open`` does.
    """
    size_bytes = stat_file(path, within=within).st_size
    if size_bytes > max_bytes:
        raise RecordError(
            f"{path} has {size_bytes / 1e6:.1f} MB, and no such file is larger than {max_bytes / 1e6:.0f} MB; "
            "restore it from a copy, or remove it"
        )
    return os.fdopen(os.open(path, _READ), "rb")


def read_file(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a file as ``open_file`` opens it."""
    with open_file(path, within=within, max_bytes=max_bytes) as file:
        return file.read()  # a bound here would be allocated at once


def stat_file(path: Path, *, within: Path) -> os.stat_result:
    """Size and times of a regular file. Raises as ``open_file`` does."""
    status = os.lstat(inside(path, within))
    if not stat.S_ISREG(status.st_mode):
        raise irregular(path, status.st_mode)
    return status


def is_there(path: Path, *, within: Path) -> bool:
    """True where ``path`` is an entry of any kind; anything but a regular file is refused once it is opened.

    Raises OutsideError when a folder on the way is none.
    """
    try:
        os.lstat(inside(path, within))
    except (FileNotFoundError, NotADirectoryError, UnicodeEncodeError):  # no file has a name that cannot be encoded
        return False
    return True


def is_file(path: Path, *, within: Path) -> bool:
    """True where ``path`` is a regular file to which no link leads from ``within``."""
    try:
        stat_file(path, within=within)
    except (OSError, OutsideError):
        return False
    return True


def entry_names(folder: Path, *, within: Path, files_only: bool = False) -> list[str]:
    """Sorted names of the entries of a folder, or of its regular files alone. Raises as ``inside`` does."""
    inside(folder / "entry", within)
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not files_only or entry.is_file(follow_symlinks=False))


def make_folder(path: Path, *, within: Path) -> None:
    """Create a directory, with those above it; one that exists stays.

    Raises OutsideError when an entry on the way is a link or no directory, OSError as ``mkdir`` does.
    """
    with suppress(FileNotFoundError):
        inside(path / "entry", within)  # what exists is a directory
    path.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, content: bytes, *, within: Path, is_derived: bool = False) -> None:
    """Replace a file in one step with ``content``, on disk before the name changes.

    A derived file can be written again, so the system decides when it is on disk: to wait takes milliseconds.
    Other processes may replace the same file meanwhile. Raises OutsideError when a folder on the way is a link,
    OSError naming ``path`` as ``write`` and ``rename`` do. A device is not replaced.
    """
    with suppress(OSError):  # such as of a file that is not there yet
        mode = path.lstat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise irregular(path, mode)
    unnamed = inside(path, within).with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with unnamed.open("xb") as file:
            file.write(content)
            file.flush()
            if not is_derived:
                os.fsync(file.fileno())
        unnamed.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # it has its name
            unnamed.unlink()


def open_to_append(path: Path, *, within: Path) -> BinaryIO:
    """Open a regular file at its end, or a new one.

    Raises OutsideError and OSError as ``open_file`` does.
    """
    with suppress(FileNotFoundError):
        stat_file(path, within=within)
    return os.fdopen(os.open(path, _APPENDED, 0o666), "ab")


def move_entry(path: Path, target: Path, *, within: Path) -> None:
    """Give an entry another name within the directory; a link moves itself. Raises as ``replace_file`` does."""
    inside(path, within).rename(inside(target, within))


def files_below(directory: Path, name: str) -> list[Path]:
    """Paths of the files called ``name`` in a directory and all below it, in order. Links are not followed.

    Raises OutsideError where an entry of that name is not a regular file, RecordError where there are too many to
    search.
    """
    paths: list[Path] = []
    num_entries = 0
    for folder, folders, files in os.walk(directory):
        num_entries += len(folders) + len(files)
        if num_entries > SEARCHED_ENTRIES:
            raise RecordError(
                f"{directory} has more than {SEARCHED_ENTRIES:,} entries, too many to look for {name}; name the "
                "directory of the results itself"
            )
        if name in files or any(each == name and (Path(folder) / each).is_symlink() for each in folders):
            paths.append(Path(folder) / name)
    require_files(paths, within=directory)
    return sorted(paths)


def require_files(paths: Sequence[Path], *, within: Path) -> None:
    """Raise OutsideError at the first path that is there and no regular file of the directory ``within``."""
    for path in paths:
        with suppress(FileNotFoundError):
            stat_file(path, within=within)


DECODING_ERRORS: Final[tuple[type[Exception], ...]] = (
    ValueError,  # with UnicodeDecodeError, json.JSONDecodeError and Python's limit of digits
    RecursionError,
    OverflowError,
    EOFError,
    msgspec.MsgspecError,
    csv.Error,
    struct.error,
    zlib.error,
)
"""Caught around a decoder alone: around more, they would hide mistakes of ours.
Readers of YAML add ``yaml.YAMLError``."""


def decoding_problem(error: Exception) -> str:
    """One line on ``error`` for a message that names the file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start}: {error.reason})"
    problem = next(iter(str(error).splitlines()), "") or type(error).__name__
    problem = problem.replace("Invalid UTF-8 encoded string", "it is not UTF-8 text")  # msgspec 0.23 and later
    return re.sub(r"Expected `str` matching regex '.*'(?= - at )", "it names no file of the directory", problem)


def field_problem(error: Exception, document: Mapping[str, object]) -> str:
    """``decoding_problem``, with the value of the field that does not fit its type or its law."""
    problem = decoding_problem(error)
    field = re.search(r" - at `\$\.([\w.\[\]]+)`", problem)
    if field is None:
        return problem
    value: Any = document
    try:
        for step in re.findall(r"\w+", field[1]):
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (LookupError, TypeError, ValueError):  # a key that is no word
        return problem
    name, text = field[1].removesuffix("[...]"), json.dumps(value, ensure_ascii=False)
    return f"{name} is {visible_line(text, VALUE_CHARS)}: {problem}"


MOST_DIGITS: Final = 300
"""Digits of a whole number, which fits into a double."""
_BOM: Final = b"\xef\xbb\xbf"
_MEGA: Final = 1 << 20


class UnreadableError(UsageError):
    """A file is not what it should be. The text names place and problem; its reader adds the remedy."""


def read_bytes(path: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The whole content. Raises UnreadableError where it cannot be read, or is over ``max_bytes``."""
    content = bytearray()
    try:
        with path.open("rb") as file:
            while len(content) <= max_bytes and (piece := file.read(_MEGA)):
                content += piece
    except OSError as error:
        raise _cannot_be_read(path, error) from error
    if len(content) > max_bytes:
        raise UnreadableError(f"{path}: larger than {max_bytes // _MEGA} MiB, the limit for it")
    return bytes(content)


def read_text(path: Path, max_bytes: int = DOCUMENT_BYTES) -> str:
    """The whole content as UTF-8 without a byte order mark. Raises UnreadableError."""
    return utf8_text(read_bytes(path, max_bytes), path)


def utf8_text(content: bytes, where: object) -> str:
    """``content`` as text without a byte order mark. Raises UnreadableError that names ``where``."""
    try:
        return content.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{where}: cannot be read: {decoding_problem(error)}") from error


def read_json(path: Path, max_bytes: int = DOCUMENT_BYTES) -> Any:
    """The JSON document in a file, as ``json_value`` reads it. Raises UnreadableError."""
    return json_value(read_text(path, max_bytes), path)


def json_value(text: str, where: object) -> Any:
    """JSON as Python writes it, with NaN and Infinity; every number is in the range of a double or infinite.

    Raises UnreadableError that names ``where``, also for half a pair of surrogates, which no output can show.
    """
    try:
        value = json.loads(text, parse_int=_whole_number)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except DECODING_ERRORS as error:
        raise UnreadableError(f"{where}: cannot be read as JSON: {decoding_problem(error)}") from error
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def read_lines(path: Path, max_bytes: int = LOG_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, one at a time, with their numbers from 1 and their ends.

    Raises UnreadableError where the file cannot be read, a line is over ``LINE_BYTES``, or all over ``max_bytes``.
    """
    num_bytes = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LINE_BYTES + 1), b""), start=1):
                num_bytes += len(line)
                if len(line) > LINE_BYTES:
                    raise UnreadableError(f"{path}:{number}: the line is longer than {LINE_BYTES // _MEGA} MiB")
                if num_bytes > max_bytes:
                    raise UnreadableError(
                        f"{path}:{number}: the file is larger than {max_bytes // _MEGA} MiB, the limit for it"
                    )
                yield number, line
    except OSError as error:
        raise _cannot_be_read(path, error) from error


def read_csv(path: Path, max_bytes: int = LOG_BYTES) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file of UTF-8 text, one at a time, each with the number of its last line: the header, then
    rows with a value for each of its names, an empty text where they are shorter. Empty lines are left out.

    Raises UnreadableError as ``read_lines`` does, for what is not CSV, and for a row with more values than names.
    """
    csv.field_size_limit(min(LINE_BYTES, sys.maxsize))
    lines = (utf8_text(line, f"{path}:{number}") for number, line in read_lines(path, max_bytes))
    rows = csv.reader(lines, strict=True)
    names: list[str] = []
    try:
        for row in rows:
            names = names or row
            if len(row) > len(names):
                raise UnreadableError(f"{path}:{rows.line_num}: {len(row)} values under {len(names)} names")
            if row:
                yield rows.line_num, [*row, *[""] * (len(names) - len(row))]
    except csv.Error as error:
        raise UnreadableError(f"{path}:{rows.line_num}: cannot be read as CSV: {error}") from error


def read_csv_records(path: Path, max_bytes: int = LOG_BYTES) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of ``read_csv`` below the header by name of column, with their line numbers."""
    rows = read_csv(path, max_bytes)
    _, names = next(rows, (1, []))
    for number, row in rows:
        yield number, dict(zip(names, row, strict=True))


def _cannot_be_read(path: Path, error: OSError) -> UnreadableError:
    return UnreadableError(f"{path}: cannot be read: {error.strerror or error}")


_MOST_NODES: Final = 100_000
"""Values of a document with its aliases written out: ten lines can be a billion of them."""


def read_yaml(path: Path, max_bytes: int = PROFILE_BYTES) -> "tuple[Any, yaml.Node | None]":
    """The document in a file, in plain values, and its node with lines and columns; None for an empty file.

    Raises UnreadableError where it cannot be read, is over ``max_bytes``, or grows too large by its aliases.
    """
    import yaml  # noqa: PLC0415 - few processes read YAML

    errors: tuple[type[Exception], ...] = (*DECODING_ERRORS, yaml.YAMLError, AttributeError, LookupError)
    # PyYAML raises the last two for a tag whose text is not of it, such as ``!!int ""``
    text = read_text(path, max_bytes)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_size(node)
        document: Any = loader.construct_document(node)
    except errors as error:
        problem = " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else decoding_problem(error)
        raise UnreadableError(f"{path}: cannot be read as YAML: {problem}") from error
    return document, node


def _check_size(root: "yaml.Node") -> None:
    """Raise ValueError for a node with itself or too many in it, aliases written out, and for a number too long."""
    import yaml  # noqa: PLC0415 - as above

    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            if node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
                raise ValueError(f"a number has {len(node.value)} digits")
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = None
            parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1 + sum(map(size, parts))
        if (num_nodes := sizes[id(node)]) is None:
            raise ValueError("an alias stands inside of what it repeats")
        return num_nodes

    if (num_nodes := size(root)) > _MOST_NODES:
        raise ValueError(f"it has {num_nodes:,} values with its aliases written out, the limit is {_MOST_NODES:,}")
