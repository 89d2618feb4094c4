"""Progress of bytes that are written or received: a bar on a terminal, nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchctl.cli.output.progress import has_room_for_bars
from benchctl.cli.streams import drawing
from benchctl.untrusted.text import visible_line


@contextmanager
def bytes_progress(name: str, total_bytes: int | None) -> Iterator[Callable[[int], object]]:
    """Yield the function that is told how many more bytes are done; ``total_bytes`` None is not known."""
    from tqdm import tqdm

    with tqdm(
        desc=visible_line(name),
        total=total_bytes,
        unit="B",
        unit_scale=True,
        delay=1.0,
        dynamic_ncols=True,
        disable=not has_room_for_bars(),
        file=drawing(sys.stderr),
        leave=False,
    ) as bar:
        yield bar.update
