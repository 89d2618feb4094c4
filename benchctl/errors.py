"""The one error tree.

BenchctlError
├── UsageError               2  the command line, a profile or a needed file is wrong
│   ├── UnreadableError         a file is not what it should be (its reader says the remedy)
│   ├── ProfileError            a profile does not describe a valid experiment
│   ├── DatasetError            a dataset is missing, damaged or not the pinned one
│   ├── EngineUnavailableError  the engine is not installed here
│   ├── MissingPackageError     a package that only some commands need is not installed here
│   ├── UnsupportedError        the engine does not support a setting of the profile
│   ├── PortTakenError          the port that a profile insists on is in use
│   ├── ServerRefusalError      the server refuses a setting of the profile
│   └── ClaimedError            another process measures the block
├── InvalidDataError         4  results cannot be read, or must not be compared
│   ├── RecordError             a file of a result directory is damaged (names file and line)
│   ├── SchemaVersionError      the directory was written by a benchctl of another schema
│   ├── AlteredError            files of a result directory were altered after the measurement
│   └── NotComparableError      two results differ in more than the declared factor
├── OutOfTimeError        130  too little time is left for what comes next; what was measured is kept
├── InternalError           70  a mistake of benchctl; the message says where its traceback was written
└── RunError                 5  a run failed; its measurements are kept
    ├── ServerStartError        the server did not become ready
    ├── ServerDiedError         the server ended in mid-run
    ├── RequestRefusedError     the server refuses what the profile puts into requests
    ├── LostClaimError          another process may own the block that this one measured
    └── LoadError               the load could not be driven to its end

Each message names the location, the value and the remedy. ``cli`` alone turns ``exit_code`` into a process
exit; exceptions of other libraries are translated where they are raised.
"""

import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import ClassVar


class BenchctlError(Exception):
    """Root of every error that benchctl raises on purpose."""

    exit_code: ClassVar[int] = 5
    log_tail: str = ""
    """Last lines of the log of the server or program that failed, if one did."""
    log_title: str = "the server's log ends"


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


def require_packages(packages: Sequence[str], purpose: str) -> None:
    """Raise MissingPackageError that names all of these packages that are not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingPackageError(missing, purpose)


class UnsupportedError(UsageError):
    """The chosen engine does not support a setting of the profile of it."""


class PortTakenError(UsageError):
    """The profile insists on a port that another process holds."""


class ServerRefusalError(UsageError):
    """The server refuses a setting of the profile; ``log_tail`` holds the end of its log."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


class ClaimedError(UsageError):
    """Another process measures the block; the message names it."""


class OutOfTimeError(BenchctlError):
    """Too little time is left for what would come next; nothing of it was begun."""

    exit_code = 130


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


class InternalError(BenchctlError):
    """A mistake of benchctl itself; ``cli`` makes it of every exception that nothing else explains."""

    exit_code = 70


class RunError(BenchctlError):
    """A run failed; its measurements until then are kept.

    ``cause`` is a short machine-readable class such as ``port-taken`` or ``out-of-memory``; ``log_tail``
    holds the last lines of the server's log.
    """

    exit_code = 5
    cause: str = "unknown"

    def __init__(self, message: str, *, cause: str | None = None, log_tail: str = "") -> None:
        super().__init__(message)
        self.cause = cause or self.cause
        self.log_tail = log_tail


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


class LostClaimError(RunError):
    """Another process may own the block by now, so that nothing more of it may be written here."""

    cause = "claim-lost"


class LoadError(RunError):
    """The load could not be driven to its end."""
