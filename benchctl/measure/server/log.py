"""The end of a server's log.

The file stays open from the start of the server and can be read even after it was renamed, deleted or truncated.
Only its end is read, so its size does not matter.
"""

import os
import re
from pathlib import Path
from typing import Final

from benchctl.untrusted.text import visible_line

SEARCHED_BYTES: Final = 65_536
"""Size of the end that is searched for known failures: the cause is above the traces of its consequences."""
_TAIL_BYTES: Final = 16_384
_TAIL_LINES: Final = 20
_LINE_CHARS: Final = 100
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and moves of the cursor, which servers' progress bars are full of."""


class ServerLog:
    """The log at ``path``, which exists. After ``close`` its end stays as it was."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._closed_end = b""
        self._size_bytes = 0

    def close(self) -> None:
        """Close the file, keeping its end in memory."""
        if self._handle is not None:
            self._closed_end = self._end()
            os.close(self._handle)
            self._handle = None

    def has_changed(self) -> bool:
        """True when its size differs from that at the last call."""
        size_bytes = os.fstat(self._handle).st_size if self._handle is not None else self._size_bytes
        has_changed, self._size_bytes = size_bytes != self._size_bytes, size_bytes
        return has_changed

    def end(self) -> str:
        return self._end().decode(errors="replace")

    def tail(self) -> str:
        return "\n".join(self._end()[-_TAIL_BYTES:].decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def last_line(self) -> str:
        """The last line that is not blank, shortened; of a line that was overwritten, its last state."""
        for line in reversed(self.tail().splitlines()):
            if text := visible_line(_COLOURS.sub("", line).strip(), _LINE_CHARS):
                return text
        return ""

    def _end(self) -> bytes:
        if self._handle is None:
            return self._closed_end
        size_bytes = os.fstat(self._handle).st_size
        return os.pread(self._handle, SEARCHED_BYTES, max(0, size_bytes - SEARCHED_BYTES))
