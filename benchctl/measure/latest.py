"""The name ``latest`` beside result directories, for people who type paths."""

from contextlib import suppress
from pathlib import Path


def point_latest(path: Path) -> None:
    """Let ``latest`` beside the result directory ``path`` name it, as the newest one."""
    link = path.with_name(".latest.partial")
    # A file system without links only costs the convenience.
    with suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(path.name, target_is_directory=True)
        link.replace(path.with_name("latest"))
