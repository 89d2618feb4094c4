"""The end of a server's log: what it said last, whatever becomes of the file's name.

The file is held open from the start of the server: one that is renamed, deleted or cut while the server writes is
read on. Only its end is ever read, so its size does not matter.
"""

import os
import re
from pathlib import Path
from typing import Final

SEARCHED_BYTES: Final = 65_536
"""How much of the end is searched for known failures: the cause stands above the traces of those who suffer it."""
_TAIL_BYTES: Final = 16_384
_TAIL_LINES: Final = 20
_LINE_CHARS: Final = 100
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class ServerLog:
    """The log at ``path``, which exists. After ``close`` its end is what it was then."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._kept = b""
        self._size_bytes = 0

    def close(self) -> None:
        """Let go of the file, keeping its end."""
        if self._handle is not None:
            self._kept = self._end()
            os.close(self._handle)
            self._handle = None

    def has_changed(self) -> bool:
        """Whether it has another size than when this was last asked."""
        size_bytes = os.fstat(self._handle).st_size if self._handle is not None else self._size_bytes
        has_changed, self._size_bytes = size_bytes != self._size_bytes, size_bytes
        return has_changed

    def end(self) -> str:
        """As much of its end as is searched for known failures."""
        return self._end().decode(errors="replace")

    def tail(self) -> str:
        """Its last lines, as a record keeps them."""
        return "\n".join(self._end()[-_TAIL_BYTES:].decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def last_line(self) -> str:
        """The last line that says anything, shortened, and of a line that was overwritten its last state."""
        for line in reversed(self.tail().splitlines()):
            if said := _CONTROL.sub("", line).strip():
                return said if len(said) <= _LINE_CHARS else said[: _LINE_CHARS - 1] + "…"
        return ""

    def _end(self) -> bytes:
        if self._handle is None:
            return self._kept
        size_bytes = os.fstat(self._handle).st_size
        return os.pread(self._handle, SEARCHED_BYTES, max(0, size_bytes - SEARCHED_BYTES))
