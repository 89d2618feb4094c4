"""The one error tree.

BenchctlError
├── UsageError               2  the command line, a profile or a needed file is wrong
│   ├── ProfileError            a profile does not say a valid experiment
│   ├── DatasetError            a dataset is missing, damaged or not what was pinned
│   ├── EngineUnavailableError  the engine is not installed here
│   ├── UnsupportedError        the engine cannot do what the profile asks
│   ├── PortTakenError          the port that a profile insists on is in use
│   └── ServerRefusalError      the server refuses what the profile asks of it
├── InvalidDataError         4  results cannot be read, or must not be compared
│   ├── RecordError             a file of a result directory is damaged (names file and line)
│   ├── SchemaVersionError      the directory was written by a newer benchctl
│   ├── AlteredError            a result directory is not what was measured any more
│   └── NotComparableError      two results differ in more than the declared factor
└── RunError                 5  a run failed; what it measured is kept
    ├── ServerStartError        the server did not become ready
    ├── ServerDiedError         the server ended in mid-run
    └── LoadError               the load could not be driven to its end

Each message names the place, the value and the remedy. ``cli`` alone turns ``exit_code`` into a process
exit; foreign exceptions are translated where they enter.
"""

from typing import ClassVar


class DeprecatedWordWarning(FutureWarning):
    """A profile uses an older word, which a later version of benchctl will refuse."""


class BenchctlError(Exception):
    """Root of every error that benchctl raises on purpose."""

    exit_code: ClassVar[int] = 5
    log_tail: str = ""
    """The last lines of the log of a server that is to blame."""


class UsageError(BenchctlError):
    """The command line, a profile or a needed file is wrong."""

    exit_code = 2


class ProfileError(UsageError):
    """A profile does not describe a valid experiment; the message lists every error with its line."""


class DatasetError(UsageError):
    """A dataset is missing, damaged or not the pinned one."""


class EngineUnavailableError(UsageError):
    """The chosen engine is not installed here."""


class UnsupportedError(UsageError):
    """The chosen engine cannot do what the profile asks of it."""


class PortTakenError(UsageError):
    """The profile insists on a port that another process holds."""


class ServerRefusalError(UsageError):
    """The server refuses what the profile asks of it; ``log_tail`` holds its last words."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


class InvalidDataError(BenchctlError):
    """Results cannot be read, or must not be compared."""

    exit_code = 4


class RecordError(InvalidDataError):
    """A file of a result directory is damaged; the message names file, line and remedy."""


class SchemaVersionError(InvalidDataError):
    """The result directory was written by a newer benchctl."""


class AlteredError(InvalidDataError):
    """Files of a result directory are not what was measured any more; the message names each."""


class NotComparableError(InvalidDataError):
    """Two results differ in more than the declared factor; ``differences`` names each."""

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class RunError(BenchctlError):
    """A run failed; what it measured until then is kept.

    ``cause`` is a short machine-readable class such as ``port-taken`` or ``out-of-memory``; ``log_tail``
    holds the last lines of the server's log.
    """

    exit_code = 5

    def __init__(self, message: str, *, cause: str = "unknown", log_tail: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        self.log_tail = log_tail


class ServerStartError(RunError):
    """The server did not become ready; with ``is_profile_fault`` none of this variant ever will."""

    def __init__(
        self, message: str, *, cause: str = "unknown", log_tail: str = "", is_profile_fault: bool = False
    ) -> None:
        super().__init__(message, cause=cause, log_tail=log_tail)
        self.is_profile_fault = is_profile_fault


class ServerDiedError(RunError):
    """The server ended while it was needed."""


class LoadError(RunError):
    """The load could not be driven to its end."""
