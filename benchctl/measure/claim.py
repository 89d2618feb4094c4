"""A claim on a result directory: while one benchctl measures into it, no other does.

The claim is a lock that the kernel holds for the process, so that it ends with it, however it ends.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchctl.errors import UsageError


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for this process. Raises UsageError when another one holds it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks leaves it to the user
            _lock(handle, directory)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, directory: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{directory}: another benchctl is measuring into this directory; wait until it has ended, or stop it"
        ) from None
