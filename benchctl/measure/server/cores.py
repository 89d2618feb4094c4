"""Processor cores of the server and of the client, where they share a machine.

A server that computes on the CPU takes every core, and the load generator on the same machine then reads tokens
late. With a core of its own the client is on time; the server has one core less, equally in all variants.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

_THREADS = Path("/proc/self/task")
_CORES_FOR_ONE: Final = 8
"""Cores of a machine on which a server hardly misses the one that is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSplit:
    """Numbers of the cores of either side; no core is in both."""

    server: frozenset[int]
    client: frozenset[int]

    def as_config(self) -> dict[str, str]:
        """The split in the effective configuration of a run, under the name of the option in the profile."""
        return {
            "server.client_cores": f"client on {core_ranges(self.client)}, server on {core_ranges(self.server)}"
        }


def split_cores(option: Literal["auto"] | int, num_processes: int = 1) -> CoreSplit | None:
    """The last of our cores for the client, the others, at least one, for the server.

    ``auto`` gives the client a core for each of its ``num_processes``, if that is an eighth of all or less. None if
    it gets no core: there are too few, the option is 0, or the system cannot bind processes to cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    if option == "auto":
        option = num_processes if num_processes * _CORES_FOR_ONE <= len(usable) else 0
    count = min(option, len(usable) - 1)
    if count < 1:
        return None
    return CoreSplit(server=frozenset(usable[:-count]), client=frozenset(usable[-count:]))


def thread_on(cores: frozenset[int] | None) -> AbstractContextManager[None]:
    """Bind the calling thread, and what it starts meanwhile, to ``cores``; None changes nothing."""
    return _bound(cores, partial(os.sched_setaffinity, 0))


def process_on(cores: frozenset[int] | None) -> AbstractContextManager[None]:
    """Bind all threads of this process, and what they start meanwhile, to ``cores``; None changes nothing."""

    def bind(cores: Iterable[int]) -> None:
        for thread in _THREADS.iterdir():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(int(thread.name), cores)

    return _bound(cores, bind)


@contextmanager
def _bound(cores: frozenset[int] | None, bind: Callable[[Iterable[int]], None]) -> Iterator[None]:
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    bind(cores)
    try:
        yield
    finally:
        bind(before)


def core_ranges(cores: frozenset[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5, as Linux writes lists of cores."""
    numbered = enumerate(sorted(cores))
    runs = [[core for _, core in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
