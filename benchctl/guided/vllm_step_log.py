"""The log of guided steps of a vLLM server: one line of JSON for each step that had a row to guide.

``step`` counts the steps of the server from 0, as ``iteration_index`` of vLLM's own record of the step does, so
that the two can be put together; ``num_seqs`` is the size of the batch, by which that can be checked. ``start_ns``
and ``end_ns`` are those of the guidance, on CLOCK_MONOTONIC. ``sections_ns`` are times of the host, which does not
wait for a GPU: there they are times of launching, not of computing.

``sampler_total`` is vLLM's whole sampler, ``pre_lvm`` its part before the guidance and ``sample`` the one after it.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchctl.guided.guide import GuideStep


class GuidedStepLog:
    """Takes times of sections, and writes them with what was done."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._sections_ns: dict[str, int] = {}
        self._sampler_start_ns: int | None = None
        self._pending: dict[str, Any] | None = None

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to the section of this step."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._sections_ns[name] = self._sections_ns.get(name, 0) + time.monotonic_ns() - start_ns

    def record(self, *, step: int, num_seqs: int, start_ns: int, did: GuideStep) -> None:
        """Say what the guidance of a step did; the line is written when the sampler is done."""
        end_ns = time.monotonic_ns()
        counted = {name: value for name, value in asdict(did).items() if value is not None}
        line = {"step": step, "num_seqs": num_seqs, "start_ns": start_ns, "end_ns": end_ns, **counted}
        self._pending = {**line, "sections_ns": self._sections_ns}
        self._sections_ns = {}
        if self._sampler_start_ns is None:
            self._write()

    def watch_sampler(self, sampler: type) -> None:
        """Time ``forward`` of vLLM's sampler from now on."""
        forward = sampler.forward  # type: ignore[attr-defined]
        sampler.forward = self._timed(forward)  # type: ignore[attr-defined]

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def timed(*given: Any, **named: Any) -> Any:
            self._sampler_start_ns = start_ns = time.monotonic_ns()
            try:
                return forward(*given, **named)
            finally:
                self._end_sampler(start_ns)
                self._sampler_start_ns = None

        return timed

    def _end_sampler(self, start_ns: int) -> None:
        if self._pending is None:
            return
        end_ns = time.monotonic_ns()
        sections = self._pending["sections_ns"]
        sections["sampler_total"] = end_ns - start_ns
        sections["pre_lvm"] = self._pending["start_ns"] - start_ns
        sections["sample"] = end_ns - self._pending["end_ns"]
        self._write()

    def _write(self) -> None:
        line = json.dumps(self._pending, separators=(",", ":")).encode() + b"\n"
        self._pending = None
        if os.write(self._file, line) != len(line):
            raise OSError("a line of the log of guided steps could not be written; the disk may be full")
