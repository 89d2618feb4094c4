"""A wall clock that a test sets for the processes that it starts, by ``set_clock.c``; the machine's own is left."""

import mmap
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("set_clock.c")
_MOST_ENTRIES = 255
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) is installed")


class SetClock:
    """The clock of processes started with ``environment``. ``set_by`` sets it off the true time by seconds."""

    def __init__(self, directory: Path) -> None:
        library, table = directory / "set_clock.so", directory / "clock-table"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, _SOURCE, "-ldl"], check=True)
        table.write_bytes(bytes(8 + 16 * _MOST_ENTRIES))
        with table.open("r+b") as file:
            self._table = mmap.mmap(file.fileno(), 0)
        self._count = 0
        self.environment = {"LD_PRELOAD": str(library), "BENCHCTL_TEST_CLOCK": str(table)}

    def set_by(self, seconds: float) -> None:
        entry = struct.pack("@qq", time.time_ns(), round(seconds * 1e9))
        self._table[8 + 16 * self._count : 24 + 16 * self._count] = entry
        self._count += 1
        self._table[:8] = struct.pack("@q", self._count)
