"""The one error tree, and refusals of the operating system in words.

BenchctlError
├── UsageError               2  the command line, a profile or a needed file is wrong
│   ├── UnreadableError         a file is not what it should be (its reader says the remedy)
│   ├── ProfileError            a profile does not describe a valid experiment
│   ├── DatasetError            a dataset is missing, damaged or not the pinned one
│   ├── EngineUnavailableError  the engine is not installed here
│   ├── MissingPackageError     a package that only some commands need is not installed here
│   ├── UnsupportedError        the engine does not support a setting of the profile
│   ├── PortTakenError          the port that a profile insists on is in use
│   └── OwnedError              another process measures the block
├── InvalidDataError         4  results cannot be read, or must not be compared
│   ├── RecordError             a file of a result directory is damaged (names file and line)
│   ├── SchemaVersionError      the directory was written by a benchctl of another schema
│   ├── AlteredError            files of a result directory were altered after the measurement
│   └── NotComparableError      two results differ in more than the declared factor
└── RunError                 5  a run failed; its measurements are kept
    ├── ServerStartError        the server did not become ready
    ├── ServerDiedError         the server ended in mid-run
    ├── RequestRefusedError     the server refuses what the profile puts into requests
    └── LoadError               the load could not be driven to its end

Each message names the location, the value and the remedy. ``cli`` alone turns ``exit_code`` into a process exit,
and any other exception into 70, a mistake of benchctl; exceptions of other libraries are translated where they are
raised. Of the operating system's refusals there is one table for all rooms, with the limit and the remedy.
"""

import errno
import os
import resource
import shlex
import sys
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

INTERRUPTED_CODE: Final = 130
"""Exit code of a process that a signal ended; ``__main__``, which imports nothing, has it, too."""


class BenchctlError(Exception):
    """Root of every error that benchctl raises on purpose."""

    exit_code: ClassVar[int] = 5
    log_title: str = "the server's log ends"

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        """``log_tail`` are the last lines of the log of the server or program that failed, if one did."""
        super().__init__(message)
        self.log_tail = log_tail


class UsageError(BenchctlError):
    """The command line, a profile or a needed file is wrong."""

    exit_code = 2


class ProfileError(UsageError):
    """A profile does not describe a valid experiment; the message lists every error with its line."""


class DatasetError(UsageError):
    """A dataset is missing, damaged or not the pinned one."""


class EngineUnavailableError(UsageError):
    """The chosen engine is not installed here."""


class MissingPackageError(UsageError):
    """A package that only some commands need is not installed here."""

    def __init__(self, packages: Sequence[str], purpose: str, *, otherwise: str = "") -> None:
        """Tell the command that installs ``packages``, which pip knows by these names.

        ``purpose`` is a clause such as "pictures cannot be drawn"; ``otherwise`` a remedy that needs no package.
        """
        several = len(packages) > 1
        named = f"{', '.join(packages[:-1])} and {packages[-1]}" if several else packages[0]
        super().__init__(
            f"the package{'s' if several else ''} {named} {'are' if several else 'is'} not installed here, and "
            f"{purpose} without {'them' if several else 'it'}; run: {sys.executable} -m pip install "
            f"{shlex.join(packages)}{f', or {otherwise}' if otherwise else ''}"
        )


class UnsupportedError(UsageError):
    """The chosen engine does not support a setting of the profile of it."""


class PortTakenError(UsageError):
    """The profile insists on a port that another process holds."""


class OwnedError(UsageError):
    """Another process measures the block; the message names it."""


class InvalidDataError(BenchctlError):
    """Results cannot be read, or must not be compared."""

    exit_code = 4


class RecordError(InvalidDataError):
    """A file of a result directory is damaged; the message names file, line and remedy."""


class SchemaVersionError(InvalidDataError):
    """The result directory was written by a benchctl of another schema."""


class AlteredError(InvalidDataError):
    """Files of a result directory were altered after the measurement; the message names each."""


class NotComparableError(InvalidDataError):
    """Two results differ in more than the declared factor; ``differences`` names each."""

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class RunError(BenchctlError):
    """A run failed; its measurements until then are kept.

    ``cause`` is a short machine-readable class such as ``port-taken`` or ``out-of-memory``.
    """

    exit_code = 5
    cause: str = "unknown"

    def __init__(self, message: str, *, cause: str | None = None, log_tail: str = "") -> None:
        super().__init__(message, log_tail=log_tail)
        self.cause = cause or self.cause


class ServerStartError(RunError):
    """The server did not become ready; with ``is_profile_error`` no server of this variant ever will."""

    def __init__(
        self, message: str, *, cause: str | None = None, log_tail: str = "", is_profile_error: bool = False
    ) -> None:
        super().__init__(message, cause=cause, log_tail=log_tail)
        self.is_profile_error = is_profile_error


class ServerDiedError(RunError):
    """The server ended while it was needed."""


class RequestRefusedError(RunError):
    """The server refuses what the profile puts into requests; no run of these settings can succeed."""

    cause = "request-refused"


class LoadError(RunError):
    """The load could not be driven to its end."""


class SystemFailure(NamedTuple):
    """A refusal of the operating system. Records keep ``cause``; the command line shows the rest."""

    cause: str
    """Class of the failure, such as ``disk-full``."""
    problem: str
    remedy: str
    choice: str = ""
    """What else a user can do before anything was begun."""


OWN_LIMITS: Final = frozenset({"too-many-open-files", "out-of-memory"})
"""Causes for which a request fails that never reached the server."""
KEPT: Final = "what was measured is kept"
_OF_THE_PLACE: Final = frozenset({"read-only", "no-permission", "system-error"})
"""Causes against which another place helps; a full disk, or a limit, has its own remedy."""
_BYTES_PER_CORE: Final = 82_000_000
"""Address space of numpy with two threads less that with one: 340 and 258 MB."""
_NO_THREAD: Final = "can't start new thread"
_SIGNS: Final = (
    (errno.EMFILE, "Too many open files"),
    (errno.ENOMEM, "Cannot allocate memory"),
    (errno.ENOMEM, "cannot allocate memory"),
    (errno.ENOMEM, "MemoryError"),
    (errno.ENOMEM, "failed to map segment"),
    (errno.EAGAIN, _NO_THREAD),
    (errno.EAGAIN, "Resource temporarily unavailable"),
    (errno.ENOSPC, "No space left on device"),
    (errno.EDQUOT, "Disk quota exceeded"),
    (errno.EFBIG, "File too large"),
    (errno.EROFS, "Read-only file system"),
    (errno.EIO, "Input/output error"),
)
"""Words by which programs and libraries report these errors."""


def _system_failures() -> dict[int, SystemFailure]:
    """The refusals by the number of their error, with the limits of this process.

    An error that no limit explains has no entry: it is what its own message says.
    """
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_NPROC)
    open_files, address_space, processes = (resource.getrlimit(kind)[0] for kind in kinds)
    memory = ("memory ran out", "end other programs, or use a machine with more memory")
    if address_space != resource.RLIM_INFINITY:
        problem = (
            f"memory ran out: a process may reserve {address_space / 1e6:,.0f} MB of address space (ulimit -v)"
        )
        memory = (problem, "raise the limit: ulimit -v unlimited")
    is_unlimited = processes == resource.RLIM_INFINITY
    most_processes = "of the container or the system" if is_unlimited else f"{processes:,} (ulimit -u)"
    words, elsewhere = os.strerror, "name another directory"
    permission = SystemFailure("no-permission", words(errno.EACCES), "correct the permissions", elsewhere)
    return {
        errno.EMFILE: SystemFailure(
            "too-many-open-files",
            f"Too many open files: a process may have {open_files:,}, and each request in flight takes one",
            "raise the limit: ulimit -n 65536, in a container --ulimit nofile=65536",
            "lower max_concurrency",
        ),
        errno.ENFILE: SystemFailure(
            "too-many-open-files",
            words(errno.ENFILE),
            "end other programs, or raise the system's limit: sysctl fs.file-max",
        ),
        errno.ENOMEM: SystemFailure("out-of-memory", *memory),
        errno.EAGAIN: SystemFailure(
            "too-many-processes",
            f"no further process or thread can be started; the limit is {most_processes}",
            "end other programs, or raise the limit (ulimit -u, in a container --pids-limit)",
        ),
        errno.ENOSPC: SystemFailure("disk-full", words(errno.ENOSPC), "free space there", elsewhere),
        errno.EDQUOT: SystemFailure("disk-quota", words(errno.EDQUOT), "free space within the quota", elsewhere),
        errno.EFBIG: SystemFailure(
            "file-too-large", words(errno.EFBIG), "raise the limit of the size of a file: ulimit -f unlimited"
        ),
        errno.EROFS: SystemFailure("read-only", words(errno.EROFS), "make it writable", elsewhere),
        errno.EACCES: permission,
        errno.EPERM: permission._replace(problem=words(errno.EPERM)),
        errno.EIO: SystemFailure(
            "disk-error",
            f"{words(errno.EIO)}: the device behind it fails",
            "dmesg says which device; use another one",
        ),
        errno.ENAMETOOLONG: SystemFailure("name-too-long", words(errno.ENAMETOOLONG), "choose a shorter name"),
    }


def system_failure(error: BaseException) -> SystemFailure | None:
    """The refusal of the system behind ``error``; None for any other error.

    Also Python's own words for one are recognised: a thread that cannot be started, and a library that cannot be
    loaded for lack of memory or files.
    """
    failures = _system_failures()
    if isinstance(error, MemoryError):
        return failures[errno.ENOMEM]
    if isinstance(error, OSError):
        is_full_pipe = error.errno == errno.EAGAIN and error.strerror != os.strerror(errno.EAGAIN)
        return None if is_full_pipe else failures.get(error.errno or 0)
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        has_limit = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        return failures[errno.ENOMEM if has_limit else errno.EAGAIN]
    return failure_in_text(str(error)) if isinstance(error, ImportError) else None


def failure_in_text(text: str) -> SystemFailure | None:
    """The refusal that ``text`` quotes, such as the log of a server: the last one by its place."""
    position, number = max((text.rfind(sign), number) for number, sign in _SIGNS)
    return None if position < 0 else _system_failures()[number]


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
