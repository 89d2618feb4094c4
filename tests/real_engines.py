"""What tests of real engines share: is an engine installed here, a model for it, and its turn on the machine."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchctl.checkpoints.make import make_model
from benchctl.checkpoints.recipe import Recipe
from benchctl.costs.shapes import ModelShape
from benchctl.engines.environment import engines_directory


def needs(kind: str) -> pytest.MarkDecorator:
    """Skips a test where ``scripts/engines/install_<kind>.sh`` has not been run.

    ``scripts/test`` installs engines and names them in BENCHCTL_DEMANDED_ENGINES: their tests must not be skipped.
    """
    python = engines_directory() / kind / "bin" / "python"
    reason = f"engine {kind} is not installed at {python}; run scripts/engines/install_{kind}.sh"
    is_demanded = kind in os.environ.get("BENCHCTL_DEMANDED_ENGINES", "").split()
    return pytest.mark.skipif(not is_demanded and not os.access(python, os.X_OK), reason=reason)


def tiny_model(directory: Path) -> Path:
    """A model of random weights, made once in ``directory``, for every engine."""
    model = directory / "tiny"
    if not model.exists():
        shape = ModelShape(
            name="tiny", layers=2, hidden=128, q_heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=2048,
            tied_embeddings=True, qkv_bias=True,
        )  # fmt: skip
        make_model(model, Recipe(arch="qwen2", shape=shape, context=4096, dtype="bfloat16", seed=0))
    return model


@contextmanager
def turn_of(kind: str) -> Iterator[None]:
    """One server of a heavy engine at a time on this machine, however many tests run side by side."""
    with (Path(tempfile.gettempdir()) / f"benchctl-{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
