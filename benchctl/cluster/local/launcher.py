"""Becomes the program that measures a block, on its cores and bound to the life of the one that hands out blocks.

A program of its own: what it sets, it sets for itself, between no two threads of another process. The arguments are
the id of the process that hands out blocks, the cores as ``0,1,8`` or ``-`` for all, and the command line. On Linux
the kernel sends SIGTERM when that process ends, however it ends; the program then records its run as interrupted,
ends its server and gives its claim back.
"""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_INTERRUPTED: Final = 130


def _main() -> None:
    parent, cores, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the kernel could be asked to tell
        sys.exit(_INTERRUPTED)
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.execv(argv[0], argv)  # noqa: S606 - the same interpreter, no shell


if __name__ == "__main__":
    _main()
