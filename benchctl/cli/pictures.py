"""Pictures that the user asked for: the check that they can be drawn, before any work."""

from importlib import import_module
from pathlib import Path


def drawable(path: Path | None) -> Path | None:
    """The path of a picture. Raises MissingPackageError where one is wanted and cannot be drawn."""
    if path is not None:
        import_module("benchctl.report.plots")
    return path
