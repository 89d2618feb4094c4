"""Settings of this process for a load: an interpreter that does not delay timestamps, and enough open files."""

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_SWITCH_INTERVAL_S: Final = 0.0005
_OPEN_FILES: Final = 65_536


@contextmanager
def steady_interpreter() -> Iterator[None]:
    """Keep the interpreter's own pauses out of arrival times.

    Inside, the collector does not search for cycles: a pass would stop all streams for milliseconds, and a load
    makes no cycles. A sampler thread hands the interpreter back after half a millisecond instead of five.
    """
    interval_s, was_enabled = sys.getswitchinterval(), gc.isenabled()
    gc.freeze()  # objects that exist now are not searched at the end
    gc.disable()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.collect()
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def allow_many_open_files() -> None:
    """Raise the limit of open files of this process as far as the system permits without privilege.

    Each open request is one. Processes that are started later inherit the limit: call this before the first server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = usable_open_files()
    if soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def usable_open_files() -> int:
    """The limit of open files of a process after ``allow_many_open_files``."""
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return max(soft, min(_OPEN_FILES, hard))
