"""How many connections one process may hold."""

import resource
from contextlib import suppress
from typing import Final

_ENOUGH: Final = 65_536


def allow_many_open_files() -> None:
    """Raise the limit of open files of this process as far as the system allows without more rights.

    Each open request is one. Processes started from now on inherit it, so this comes before the first server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
