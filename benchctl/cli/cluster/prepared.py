"""``benchctl run --prepare``: a result directory whose blocks any job system measures."""

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchctl.records.directory import ResultDirectory


def print_tasks(results: "ResultDirectory") -> None:
    """Print the command of a task, and for which blocks it is needed."""
    path = shlex.quote(str(results.path))
    last = results.manifest().blocks - 1
    print(f"nothing was measured: each block from 0 to {last} is one task: benchctl run --block I --into {path}")
    print(f"progress: benchctl watch {path}; afterwards: benchctl compare {path}")
