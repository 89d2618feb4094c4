"""What a system lacked when it ended a server, which then cannot say so itself: memory, or room for its log."""

import shutil
from pathlib import Path
from typing import Final

from benchctl.engines.engine import Diagnosis

_COUNTERS: Final = Path("/proc/vmstat")
_ROOM_BYTES: Final = 65_536
"""With less room than this a server cannot be counted on to have written its last words."""
_MEMORY: Final = Diagnosis(
    cause="out-of-memory",
    remedy="the system ran out of memory and killed a process; ask for a smaller model or cache, or free memory",
)
_DISK: Final = Diagnosis(cause="disk", remedy="the disk of its log is full; free space, then go on with --resume")


class Shortage:
    """Watches from a moment before the start of a server whose log is in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_kills = _num_kills()

    def diagnosis(self) -> Diagnosis | None:
        """What has run out since; None where nothing has."""
        if _num_kills() > self._num_kills:
            return _MEMORY
        return _DISK if shutil.disk_usage(self._directory).free < _ROOM_BYTES else None


def _num_kills() -> int:
    """Processes that the kernel has killed for want of memory, on the whole system; 0 where it does not count."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
