"""What every test can rely on: no process of ours outlives it."""

from collections.abc import Iterator

import psutil
import pytest


def _server_processes() -> set[psutil.Process]:
    """Our descendants that serve: what a test started and nobody stopped."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "benchctl.sim" in " ".join(process.cmdline()):
                found.add(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True, scope="module")
def _no_server_is_left() -> Iterator[None]:
    """No module of tests leaves a server behind."""
    before = _server_processes()
    yield
    _, left = psutil.wait_procs(list(_server_processes() - before), timeout=3)
    assert not left, f"left running: {[process.cmdline() for process in left]}"
