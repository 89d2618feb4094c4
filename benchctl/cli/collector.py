"""The garbage collector during commands that only read: it looks through all records again and again, and no record
is part of a cycle.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside, or by the function that this decorates: memory is freed as ever, but for
    cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
