"""Refusals of the operating system in words: the limit that was met, and the remedy.

One table for all rooms. ``cause`` is the class that a record keeps; the command line shows ``problem`` and
``remedy``. Errors that no limit explains have no entry: they are what their own message says.
"""

import errno
import os
import resource
from collections.abc import Callable
from typing import Final, NamedTuple

from benchctl.errors import RunError, UsageError


class SystemFailure(NamedTuple):
    """A refusal of the system."""

    cause: str
    """Class of the failure, such as ``disk-full``."""
    problem: str
    remedy: str
    choice: str = ""
    """What else a user can do before anything was begun."""


_ELSEWHERE: Final = "name another directory"
OWN_LIMITS: Final = frozenset({"too-many-open-files", "out-of-memory"})
"""Causes for which a request fails that never reached the server."""
_OF_THE_PLACE: Final = frozenset({"read-only", "no-permission", "system-error"})
"""Causes against which another place helps; a full disk, or a limit, has its own remedy."""
KEPT: Final = "what was measured is kept"
_BYTES_PER_CORE: Final = 82_000_000
"""Address space of numpy with two threads less that with one: 340 and 258 MB."""
_NO_THREAD: Final = "can't start new thread"
_SHARED_OBJECT_LACKS_MEMORY: Final = "failed to map segment"


def system_failure(error: BaseException) -> SystemFailure | None:
    """The refusal of the system behind ``error``; None for any other error.

    Also Python's own words for one are recognised: a thread that cannot be started, and a library that cannot be
    loaded for lack of memory or files.
    """
    if isinstance(error, MemoryError):
        return _EXPLAIN[errno.ENOMEM]()
    if isinstance(error, OSError):
        is_full_pipe = error.errno == errno.EAGAIN and error.strerror != os.strerror(errno.EAGAIN)
        explain = None if is_full_pipe else _EXPLAIN.get(error.errno or 0)
        return None if explain is None else explain()
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return _EXPLAIN[errno.ENOMEM if _has_limit(resource.RLIMIT_AS) else errno.EAGAIN]()
    return failure_in_text(str(error)) if isinstance(error, ImportError) else None


def failure_in_text(text: str) -> SystemFailure | None:
    """The refusal that ``text`` quotes, such as the log of a server: the last one by its place."""
    signs = [(text.rfind(sign), number) for number, sign in _SIGNS]
    place, number = max(signs)
    return None if place < 0 else _EXPLAIN[number]()


def is_of_the_system(error: BaseException) -> bool:
    """True for any error of the operating system; false for mistakes of a program."""
    return isinstance(error, OSError) or system_failure(error) is not None


def as_usage_error(error: BaseException, what: object, *, remedy: str | None = None) -> UsageError:
    """The error of a command that cannot begin. ``what`` stands for the object of an ``error`` that names none.

    ``remedy`` is what to do where nothing can be written.
    """
    failure = _explained(error)
    choice = f", or {failure.choice}" if failure.choice else ""
    advice = remedy if remedy and failure.cause in _OF_THE_PLACE else f"{failure.remedy}{choice}"
    return UsageError(f"{_object_of(error, what)}{failure.problem}; {advice}")


def as_run_error(error: BaseException, what: object, *, next_step: str = "") -> RunError:
    """The error that ends a run or an experiment in the middle; ``next_step`` follows the remedy."""
    failure = _explained(error)
    message = f"{_object_of(error, what)}{failure.problem}; {failure.remedy}{next_step}"
    return RunError(message, cause=failure.cause)


def _explained(error: BaseException) -> SystemFailure:
    """The refusal behind ``error``, or the words of an error of the system that no limit explains."""
    words = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return system_failure(error) or SystemFailure("system-error", words, "correct the path or its permissions")


def _object_of(error: BaseException, what: object) -> str:
    """The beginning of a message: the file that the system refused, else ``what``, if that says anything."""
    name = getattr(error, "filename", None)
    shown = os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else str(what)
    return f"{shown}: " if shown else ""


def address_space_shortfall(needed_bytes: int) -> str | None:
    """The limit of address space, in a sentence with its remedy, where it is below what a process takes.

    ``needed_bytes`` is what it takes on two cores; for each further one, linear algebra starts a thread with memory
    of its own. Below the limit it ends the process by itself, with exit code 1 or a signal.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    needed_bytes += _BYTES_PER_CORE * max(cores - 2, 0)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or limit >= needed_bytes:
        return None
    return (
        f"a process may reserve {limit / 1e6:,.0f} MB of address space (ulimit -v), and benchctl takes about "
        f"{needed_bytes / 1e6:,.0f} MB; raise the limit: ulimit -v unlimited"
    )


def _has_limit(kind: int) -> bool:
    return resource.getrlimit(kind)[0] != resource.RLIM_INFINITY


def _open_files() -> SystemFailure:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return SystemFailure(
        "too-many-open-files",
        f"Too many open files: a process may have {limit:,}, and each request in flight takes one",
        "raise the limit: ulimit -n 65536, in a container --ulimit nofile=65536",
        "lower max_concurrency",
    )


def _memory() -> SystemFailure:
    if _has_limit(resource.RLIMIT_AS):
        limit = f"{resource.getrlimit(resource.RLIMIT_AS)[0] / 1e6:,.0f} MB"
        return SystemFailure(
            "out-of-memory",
            f"memory ran out: a process may reserve {limit} of address space (ulimit -v)",
            "raise the limit: ulimit -v unlimited",
        )
    return SystemFailure("out-of-memory", "memory ran out", "end other programs, or use a machine with more memory")


def _processes() -> SystemFailure:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    number = "of the container or the system" if limit == resource.RLIM_INFINITY else f"{limit:,} (ulimit -u)"
    return SystemFailure(
        "too-many-processes",
        f"no further process or thread can be started; the limit is {number}",
        "end other programs, or raise the limit (ulimit -u, in a container --pids-limit)",
    )


def _plain(
    cause: str, number: int, remedy: str, choice: str = "", *, remark: str = ""
) -> Callable[[], SystemFailure]:
    """An explanation in the system's own words."""
    return lambda: SystemFailure(cause, os.strerror(number) + remark, remedy, choice)


_EXPLAIN: Final[dict[int, Callable[[], SystemFailure]]] = {
    errno.EMFILE: _open_files,
    errno.ENFILE: _plain(
        "too-many-open-files", errno.ENFILE, "end other programs, or raise the system's limit: sysctl fs.file-max"
    ),
    errno.ENOMEM: _memory,
    errno.EAGAIN: _processes,
    errno.ENOSPC: _plain("disk-full", errno.ENOSPC, "free space there", _ELSEWHERE),
    errno.EDQUOT: _plain("disk-quota", errno.EDQUOT, "free space within the quota", _ELSEWHERE),
    errno.EFBIG: _plain(
        "file-too-large", errno.EFBIG, "raise the limit of the size of a file: ulimit -f unlimited"
    ),
    errno.EROFS: _plain("read-only", errno.EROFS, "make it writable", _ELSEWHERE),
    errno.EACCES: _plain("no-permission", errno.EACCES, "correct the permissions", _ELSEWHERE),
    errno.EPERM: _plain("no-permission", errno.EPERM, "correct the permissions", _ELSEWHERE),
    errno.EIO: _plain(
        "disk-error", errno.EIO, "dmesg says which device; use another one", remark=": the device behind it fails"
    ),
    errno.ENAMETOOLONG: _plain("name-too-long", errno.ENAMETOOLONG, "choose a shorter name"),
}
_SIGNS: Final = (
    (errno.EMFILE, "Too many open files"),
    (errno.ENOMEM, "Cannot allocate memory"),
    (errno.ENOMEM, "cannot allocate memory"),
    (errno.ENOMEM, "MemoryError"),
    (errno.ENOMEM, _SHARED_OBJECT_LACKS_MEMORY),
    (errno.EAGAIN, _NO_THREAD),
    (errno.EAGAIN, "Resource temporarily unavailable"),
    (errno.ENOSPC, "No space left on device"),
    (errno.EDQUOT, "Disk quota exceeded"),
    (errno.EFBIG, "File too large"),
    (errno.EROFS, "Read-only file system"),
    (errno.EIO, "Input/output error"),
)
"""Words by which programs and libraries report these errors."""
