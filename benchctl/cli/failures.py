"""The end of a command by an error: a message on stderr, and the exit code that belongs to it.

1 is never among these codes: it is a verdict. Only the standard library and ``benchctl.errors`` are imported before
an error is at hand, because the error may be an installation of which parts are missing.
"""

import asyncio
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from benchctl.cli.streams import log_line
from benchctl.errors import BenchctlError, InternalError, UsageError
from benchctl.system_errors import as_usage_error, is_of_the_system
from benchctl.untrusted.text import visible_lines

INTERRUPTED: Final = 130
_COMPLETION: Final = "_BENCHCTL_COMPLETE"
"""The variable by which a shell asks for completions."""
_interrupts: Final[list[None]] = []
"""One entry for each interrupt that came while no coroutine ran."""


def note_interrupt() -> None:
    """Record that the user interrupted the command; a library may make an error of its own of KeyboardInterrupt."""
    _interrupts.append(None)


def exit_code_of(leaving: SystemExit) -> int:
    """The exit code of a command that left by ``leaving``, which Typer raises while it handles what ended it."""
    import typer

    reason = leaving.__context__
    if isinstance(reason, typer.Exit):
        return reason.exit_code
    if isinstance(reason, typer.Abort):
        return _code_without_answer(reason)
    if isinstance(reason, OSError):
        return report_failure(reason)
    if hasattr(reason, "format_message"):  # Typer has printed what is wrong with the command line
        return UsageError.exit_code
    if not leaving.code:
        return 0
    return UsageError.exit_code if _COMPLETION in os.environ else report_failure(leaving)


def _code_without_answer(abort: BaseException) -> int:
    if isinstance(abort.__context__, KeyboardInterrupt):
        return INTERRUPTED
    tell("benchctl: the input ended before every question was answered; give the answers as options (see --help)")
    return UsageError.exit_code


def report_failure(error: BaseException) -> int:
    """Print why the command could not do its work; returns the exit code."""
    cause = _decisive(error)
    if isinstance(cause, KeyboardInterrupt) or _interrupts:
        return INTERRUPTED
    if isinstance(cause, BenchctlError):
        _tell_error(cause)
        return cause.exit_code
    if is_of_the_system(cause):
        _tell_system_error(cause)
        return UsageError.exit_code
    from benchctl.cli.internal_errors import internal_error_message

    tell(internal_error_message(cause))
    return InternalError.exit_code


def tell(message: str) -> None:
    """Print a message on stderr, if that can be written."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr)


def _decisive(error: BaseException) -> BaseException:
    """``error`` itself, or of a group the error that says most: an interrupt, an unforeseen one, then any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [leaf for leaf in _leaves(error) if not isinstance(leaf, asyncio.CancelledError)]
    return min(leaves, key=_rank, default=error)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup):
            yield from _leaves(member)
        else:
            yield member


def _rank(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 0
    if isinstance(error, BenchctlError):
        return 2
    return 3 if is_of_the_system(error) else 1


def _tell_error(error: BenchctlError) -> None:
    from benchctl.untrusted.secrets import redacted

    tell(f"benchctl: {visible_lines(redacted(str(error)))}")
    if error.log_tail:
        tell("\n".join((f"{error.log_title}:", *map(log_line, redacted(error.log_tail).splitlines()))))
    if isinstance(error, UsageError) and _is_directory_gone():
        tell("benchctl: the current directory was deleted, so no relative path leads anywhere; cd to another one")


def _tell_system_error(error: BaseException) -> None:
    if isinstance(error, FileNotFoundError) and _is_directory_gone():
        tell("benchctl: the current directory was deleted; cd to another one")
        return
    is_of_output = getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    _tell_error(as_usage_error(error, "the output" if is_of_output else ""))


def _is_directory_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib may be what cannot be imported
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False
