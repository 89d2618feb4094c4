"""Waiting for what happens elsewhere: in a process, in a file, on a network."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(what: str, happens: Callable[[], Any], limit_s: float = 60.0, pause_s: float = 0.02) -> Any:
    """What ``happens`` returns when it is true; an error when it is not in time. It is asked after each pause."""
    deadline = time.monotonic() + limit_s
    while not (result := happens()):
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(pause_s)
    return result
