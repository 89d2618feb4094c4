"""Processes, other than its first, without which a server cannot work: the engine behind an HTTP front end.

They are recognised by a part of their title. A child that has just been forked has its parent's title for a moment;
therefore a process counts only when two scans have found it under such a title.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import psutil

from benchctl.measure.server.process import is_alive

_NAME_CHARS: Final = 40


class EssentialProcesses:
    """The essential processes of one server, found by repeated scans of all its processes."""

    def __init__(self, titles: tuple[str, ...]) -> None:
        """``titles`` are parts of the titles of essential processes."""
        self._titles = titles
        self._seen_once: Mapping[psutil.Process, str] = {}
        self._watched: Mapping[psutil.Process, str] = {}

    def scan(self, members: Iterable[psutil.Process]) -> None:
        """Find essential processes among ``members``, all living processes of the server."""
        if not self._titles:
            return
        named = {member: name for member in members if (name := self._name(_title(member)))}
        gone = {process: title for process, title in self._watched.items() if not is_alive(process)}
        confirmed = {process: title for process, title in named.items() if process in self._seen_once}
        self._watched = gone | confirmed
        self._seen_once = named

    def lost(self) -> str | None:
        """The processes that have ended, as the beginning of a sentence; None while all are alive."""
        gone = [f"{process.pid} ({title})" for process, title in self._watched.items() if not is_alive(process)]
        if len(gone) > 1:
            return f"processes {', '.join(gone)} of the server have gone"
        return f"process {gone[0]} of the server has gone" if gone else None

    def _name(self, title: str) -> str | None:
        """The name of an essential process: its title, or for a long command line the part that identifies it."""
        part = next((part for part in self._titles if part in title), None)
        return title if part is not None and len(title) <= _NAME_CHARS else part


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip() or process.name()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
