"""Processes without which a server cannot go on, beside its first one: the engine behind an HTTP front end.

They are known by a part of their title. A child that has just been forked carries its parent's title for a moment,
whatever it becomes; therefore a process counts when two looks have found it under such a title.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import psutil

from benchctl.measure.server.process import is_alive

_NAME_CHARS: Final = 40
_NONE: Final[Mapping[psutil.Process, str]] = MappingProxyType({})


class EssentialProcesses:
    """The essential processes of one server, found by looking at all of its processes now and then."""

    def __init__(self, titles: tuple[str, ...]) -> None:
        """``titles`` are parts of the titles of essential processes."""
        self._titles = titles
        self._seen_once = _NONE
        self._watched = _NONE

    def look(self, members: Iterable[psutil.Process]) -> None:
        """Take notice of ``members``, all processes of the server that live."""
        if not self._titles:
            return
        found = {member: name for member in members if (name := self._name(_title(member)))}
        gone = {process: title for process, title in self._watched.items() if not is_alive(process)}
        known = {process: title for process, title in found.items() if process in self._seen_once}
        self._watched = gone | known
        self._seen_once = found

    def lost(self) -> str | None:
        """Who has gone, as the beginning of a sentence; None while all live."""
        gone = [f"{process.pid} ({title})" for process, title in self._watched.items() if not is_alive(process)]
        if len(gone) > 1:
            return f"processes {', '.join(gone)} of the server have gone"
        return f"process {gone[0]} of the server has gone" if gone else None

    def _name(self, title: str) -> str | None:
        """How an essential process is called: its title, or of a long command line what is known of it."""
        part = next((part for part in self._titles if part in title), None)
        return title if part is not None and len(title) <= _NAME_CHARS else part


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip() or process.name()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
