"""The compressed streams of archives, by the end of a file's name or by its first bytes."""

import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias, cast

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdError, ZstdFile
else:
    from backports.zstd import CompressionParameter, ZstdError, ZstdFile

from benchctl.errors import UsageError
from benchctl.untrusted.files import read_head
from benchctl.untrusted.reading import DECODING_ERRORS

Compression: TypeAlias = Literal["zstd", "gzip", "none"]

STREAM_ERRORS: Final[tuple[type[Exception], ...]] = (*DECODING_ERRORS, ZstdError, gzip.BadGzipFile)
"""Raised where a compressed stream is damaged or cut short."""
_BY_SUFFIX: Final[dict[str, Compression]] = {
    ".tar.zst": "zstd",
    ".tzst": "zstd",
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar": "none",
}
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_TAR_MAGIC: Final = b"ustar"
_TAR_MAGIC_AT: Final = 257
_ZSTD_LEVEL: Final = 3  # request logs, which are most of it, gain nothing from higher ones
_GZIP_LEVEL: Final = 6


def suffix_of(path: Path) -> str | None:
    """The end of a file's name that is one of an archive; None for another name."""
    return next((suffix for suffix in _BY_SUFFIX if path.name.lower().endswith(suffix)), None)


def compression_of_name(path: Path) -> Compression:
    """The compression that the name of a new archive asks for. Raises UsageError for a name of none."""
    suffix = suffix_of(path)
    if suffix is None:
        raise UsageError(f"--archive {path}: the name of an archive ends in {', '.join(_BY_SUFFIX)}")
    return _BY_SUFFIX[suffix]


def compression_of_content(path: Path) -> Compression | None:
    """The compression of an existing file by its first bytes; None for one that is not an archive."""
    head = read_head(path, _TAR_MAGIC_AT + len(_TAR_MAGIC))
    if head.startswith(_ZSTD_MAGIC):
        return "zstd"
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    return "none" if head[_TAR_MAGIC_AT:] == _TAR_MAGIC else None


@contextmanager
def compressing(file: IO[bytes], compression: Compression) -> Iterator[IO[bytes]]:
    """A stream whose bytes reach ``file`` compressed: the same for the same bytes, without names and times."""
    if compression == "none":
        yield file
    elif compression == "gzip":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
            yield cast("IO[bytes]", packed)
    else:
        options: dict[int, int] = {
            CompressionParameter.compression_level: _ZSTD_LEVEL,
            CompressionParameter.checksum_flag: 1,
        }
        with ZstdFile(file, "wb", options=options) as stream:
            yield cast("IO[bytes]", stream)


def decompressing(file: IO[bytes], compression: Compression) -> IO[bytes]:
    """A stream of the bytes that ``file`` holds compressed. Reading raises STREAM_ERRORS where it is damaged."""
    if compression == "none":
        return file
    stream = gzip.GzipFile("", "rb", fileobj=file) if compression == "gzip" else ZstdFile(file, "rb")
    return cast("IO[bytes]", stream)
