"""What every test can rely on: signals mean what they mean at a terminal, no process of ours outlives it, and the
user's own stores of noise, durations, peaks and locks are neither read nor written. Sentences are not folded.
"""

import gc
import signal
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# How long an example takes says what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell starts background jobs deaf to Ctrl-C, and nohup to the end of a terminal; programs that tests start would
# inherit that, and tests of interrupts would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A worker imports a million objects, which stay: they are searched for cycles ten times, not a thousand times.
gc.set_threshold(100_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: begun last, one of them would keep a worker when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True, scope="session")
def _stores_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty stores of noise, durations, peaks and locks, for this process and those that it starts; and output
    in which no sentence is folded.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        for store in ("NOISE", "DURATIONS", "PEAKS", "LOCKS", "ARCHIVES"):
            patch.setenv(f"BENCHCTL_{store}_DIR", str(tmp_path_factory.mktemp("store")))
        yield


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments have no pictures in this process, which take a second or two."""
    monkeypatch.setattr("benchctl.report.export.why_not_drawn", lambda: "a test does without")


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
    """No module of tests leaves a server behind, nor makes another search what it made for cycles."""
    gc.freeze()
    before = _server_processes()
    yield
    _, left = psutil.wait_procs(list(_server_processes() - before), timeout=20)
    assert not left, f"left running: {[process.cmdline() for process in left]}"
