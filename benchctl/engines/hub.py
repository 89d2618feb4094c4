"""The checkpoint that a server loads for the model of a profile.

A profile says *what* is measured, often by a name of the table of shapes, with which costs are computed and the
simulator serves. A real server loads weights: from a directory, or from the model hub under the name of the
repository there.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

from benchctl.errors import EngineUnavailableError

REPOSITORIES: Final = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
}
"""Repositories of the built-in shapes: the instruct checkpoints, because workloads may ask in chats."""
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def checkpoint_for(model: str, kind: str) -> str:
    """The directory (absolute) or repository that an engine of ``kind`` loads for ``model``.

    Raises EngineUnavailableError, before anything is started, for a name that can be neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _refusal(kind, model, "is a directory without a config.json")
        if _configuration(path) is None:
            raise _refusal(kind, model, "has a config.json that is damaged: it holds no JSON object")
        return str(path.resolve())
    if path.exists():
        raise _refusal(kind, model, "is a file")
    if model.lower() in REPOSITORIES:
        return REPOSITORIES[model.lower()]
    if _REPOSITORY.fullmatch(model):
        return model
    raise _refusal(kind, model, "is not a directory, a repository of the hub (owner/name) or a built-in name")


def is_local(model: str) -> bool:
    """True for a model that is a directory of this machine, so that nothing has to be downloaded."""
    return Path(model).expanduser().is_dir()


def context_of(model: str) -> int | None:
    """Tokens that a model on disk was made for, prompt and output together; None where it does not say."""
    config = _configuration(Path(model).expanduser()) or {}
    text = config.get("text_config")
    positions = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def _configuration(directory: Path) -> dict[str, Any] | None:
    """The content of a model's ``config.json``; None where it cannot be read or is not a JSON object."""
    try:
        document = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _refusal(kind: str, model: str, problem: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"engine {kind!r}: model {model!r} {problem}; name a directory with the model's config.json and weights: "
        "--set model=/path/to/model"
    )
