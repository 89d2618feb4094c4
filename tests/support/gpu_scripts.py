"""The modules of ``scripts/gpu``, which are programs beside one another and no package."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"


@contextmanager
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the modules of the scripts be imported by their names, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if SCRIPTS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]
