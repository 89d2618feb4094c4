"""What every test can rely on: signals mean what they mean at a terminal, and no process of ours outlives it."""

import signal
from collections.abc import Iterator

import psutil
import pytest

# A shell starts background jobs deaf to Ctrl-C, and nohup to the end of a terminal; programs that tests start would
# inherit that, and tests of interrupts would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
