"""rsync over ssh as a child process: argument lists, bytes while they come, and errors with a remedy."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from benchctl.errors import UsageError
from benchctl.records.archive import LEFT_OUT
from benchctl.untrusted.limits import DOCUMENT_BYTES, LOG_BYTES, MESSAGE_CHARS
from benchctl.untrusted.text import visible_line

_ALWAYS: Final = (
    "--times",
    "--protect-args",  # no shell of the remote machine reads a name
    "--no-inc-recursive",
    "--no-human-readable",
    "--chmod=u+rwX",
)
_PROGRESS: Final = re.compile(rb"\s*(\d+)\s+\d+%")
_RECEIVED: Final = re.compile(rb"Literal data: (\d+) bytes")
_KEPT_AT_DESTINATION: Final = ("/*", "/plots/**", "/export/**", "result.json")
"""What is derived from results, perhaps here and not there, is not removed although the source lacks it."""
_ENDS: Final = {
    10: "the connection broke",
    11: "the files cannot be written here",
    12: "the connection broke, or rsync is not installed there",
    23: "not every file can be read there",
    30: "nothing came for a minute",
    127: "rsync is not installed there",
    255: "the host cannot be reached",
}
_VANISHED: Final = 24
"""Exit code where files went while they were listed; another pass fetches what took their place."""
_INTERRUPTED: Final = 20
_AGAIN: Final = "what came is kept, and the same command fetches the rest"
_STOP_S: Final = 5.0
_TAIL_LINES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rsync:
    """A way to fetch files."""

    shell: str | None = None
    """Command in place of ``ssh``, with its options."""
    bandwidth: str | None = None
    """At most so much a second, as ``rsync --bwlimit`` takes it: in KiB, or with a unit."""
    on_bytes: Callable[[int], object] = lambda _num: None
    """Told the size of each piece that came."""

    def fetch(self, remote: str, folder: Path) -> None:
        """Fetch one document into a folder. Raises UsageError where that is impossible."""
        self._run([f"--max-size={DOCUMENT_BYTES}", "--", remote, f"{folder.absolute()}/"], remote, is_document=True)

    def copy(self, remote: str, folder: Path, *, compares_contents: bool) -> int:
        """Make ``folder`` what the remote directory is, without what stays there; returns the bytes that came.

        A file that was cut is continued. Raises UsageError where that is impossible, KeyboardInterrupt when rsync
        was interrupted.
        """
        arguments = [
            "--recursive",
            "--partial-dir=.rsync-partial",
            "--delete",
            *(f"--filter=protect {pattern}" for pattern in _KEPT_AT_DESTINATION),
            *(f"--exclude={pattern}" for pattern in LEFT_OUT),
            f"--max-size={LOG_BYTES}",
            "--info=progress2,name0,stats2",
            *(["--checksum"] if compares_contents else []),
            *([] if self.bandwidth is None else [f"--bwlimit={self.bandwidth}"]),
            "--",
            remote,
            f"{folder.absolute()}/",
        ]
        return self._run(arguments, remote, is_document=False)

    def _run(self, arguments: list[str], remote: str, *, is_document: bool) -> int:
        program = _program(self.shell)
        shell = [] if self.shell is None else [f"--rsh={self.shell}"]
        with tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(
                [program, *_ALWAYS, "--timeout=60", *shell, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "LC_ALL": "C"},
            )
            try:
                num_bytes = self._follow(process.stdout)
                code = process.wait()
            finally:
                _stop(process)
            if code == _INTERRUPTED or -code in (signal.SIGINT, signal.SIGTERM):
                raise KeyboardInterrupt
            if code not in (0, _VANISHED):
                raise _failure(remote, code, _tail(stderr), is_document=is_document)
        return num_bytes

    def _follow(self, stdout: IO[bytes] | None) -> int:
        """Tell of the progress until rsync ends; returns the number of bytes that came, without what was here."""
        rest, total_bytes, received_bytes = b"", 0, 0
        while stdout is not None and (data := os.read(stdout.fileno(), 1 << 16)):
            *lines, rest = re.split(rb"[\r\n]", rest + data)
            for line in lines:
                if match := _PROGRESS.match(line):
                    self.on_bytes(max(int(match[1]) - total_bytes, 0))
                    total_bytes = max(total_bytes, int(match[1]))
                elif match := _RECEIVED.match(line):
                    received_bytes = int(match[1])
        return received_bytes


def require_bandwidth(text: str) -> str:
    """A limit that ``rsync --bwlimit`` takes. Raises UsageError for another text."""
    if not re.fullmatch(r"\d+(\.\d+)?[kKmMgG]?", text):
        raise UsageError(
            f"--bwlimit {text!r} is not a rate: write KiB a second, or a unit with it, such as 500 or 2M"
        )
    return text


def _program(shell: str | None) -> str:
    """The path of rsync. Raises UsageError where that or the remote shell is not installed."""
    try:
        remote_shell = shlex.split(shell or os.environ.get("RSYNC_RSH") or "ssh")[:1]
    except ValueError as error:
        raise UsageError(f"--ssh {shell!r} is not a command: {error}") from error
    for program in ("rsync", *remote_shell):
        if shutil.which(program) is None:
            raise UsageError(
                f"{program} is not installed here, and results are fetched with it; install it, or make an archive "
                "there ('benchctl export DIR --archive x.tar.gz'), copy it, and import that"
            )
    return shutil.which("rsync") or "rsync"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End rsync, which keeps a file that was cut when it is asked to end."""
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(stderr: IO[bytes]) -> list[str]:
    """The last lines that rsync and ssh wrote, made visible."""
    stderr.seek(max(stderr.seek(0, os.SEEK_END) - (64 << 10), 0))
    lines = [line for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    return [visible_line(line, MESSAGE_CHARS) for line in lines[:_TAIL_LINES]]


def _failure(remote: str, code: int, lines: list[str], *, is_document: bool) -> UsageError:
    text = "\n".join(f"  {line}" for line in lines)
    if any("command not found" in line or "rsync: not found" in line for line in lines):
        code = 127
    elif code == 12 and is_document:  # the first connection of all
        code = 255
    if code == 23 and is_document:
        return UsageError(
            f"{remote} is not there or cannot be read: name a directory that 'benchctl run' wrote there\n{text}"
        )
    problem = _ENDS.get(code, f"rsync ended with code {code}")
    remedy = "see that 'ssh HOST' works without a question" if code == 255 else _AGAIN
    if code == 127:
        remedy = "install it there, or make an archive there with 'benchctl export DIR --archive x.tar.gz'"
    return UsageError(f"{remote}: {problem}; {remedy}\n{text}".rstrip())
