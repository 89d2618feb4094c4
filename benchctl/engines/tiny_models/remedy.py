"""The command that makes a model which a profile names and this machine lacks."""

import shlex
from pathlib import Path
from typing import Literal

Part = Literal["value", "draft", "adapter"]
_OPTIONS: dict[Part, str] = {"value": "--value-model", "draft": "--draft", "adapter": "--lora"}


def pair_remedy(path: str, part: Part, key: str, *, is_base: bool = False) -> str:
    """The command that makes a small pair whose part (or base) is at ``path``.

    A command fills DIR/base and DIR/``part``. Where ``path`` is neither, or one of the two is there already, the
    words also say what to name in ``model`` and in ``key`` instead.
    """
    directory, command = Path(path), f"benchctl models make-tiny {_OPTIONS[part]}"
    pair = directory.parent
    is_taken = any(_has_files(pair / each) for each in ("base", part))
    if directory.name == ("base" if is_base else part) and not is_taken:
        return f"{command} {shlex.quote(str(pair))}"
    base, other = (shlex.quote(str(directory / each)) for each in ("base", part))
    return f"{command} {shlex.quote(path)} (then name {base} in model and {other} in {key})"


def _has_files(directory: Path) -> bool:
    path = directory.expanduser()
    return path.is_dir() and any(path.iterdir())
