"""The checkpoint that a server loads for a profile's model, its limits, and how to make a missing one."""

import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from benchctl.errors import EngineUnavailableError
from benchctl.untrusted.files import UnreadableError, read_json

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
_MOST_TOKENS: Final = 1 << 32
"""Above every vocabulary and context."""
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def checkpoint_for(model: str, kind: str) -> str:
    """The directory (absolute) or repository that an engine of ``kind`` loads for ``model``.

    Raises EngineUnavailableError, before anything is started, for a name that can be neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _refusal(kind, model, "is a directory without a config.json")
        if json_object(path / "config.json") is None:
            raise _refusal(kind, model, "has a config.json that is damaged: it holds no JSON object")
        return str(path.resolve())
    if path.exists():
        raise _refusal(kind, model, "is a file")
    if model.lower() in REPOSITORIES:
        return REPOSITORIES[model.lower()]
    if _REPOSITORY.fullmatch(model):
        return model
    raise _refusal(kind, model, "is not a directory, a repository of the hub (owner/name) or a built-in name")


def repository_of(model: str) -> str | None:
    """The repository of the model hub that has the files of ``model``; None for what can only be a path."""
    named = REPOSITORIES.get(model.lower(), model)
    return named if _REPOSITORY.fullmatch(named) else None


def is_local(model: str) -> bool:
    """True for a model that is a directory of this machine, so that nothing has to be downloaded."""
    return Path(model).expanduser().is_dir()


@lru_cache(maxsize=8)
def end_tokens_of(model: str) -> tuple[int, ...]:
    """The ids that end a text of a model on disk, by ``generation_config.json`` or else ``config.json``."""
    directory = Path(model).expanduser()
    config = json_object(directory / "config.json") or {}
    generation = json_object(directory / "generation_config.json") or {}
    stated = (document.get("eos_token_id") for document in (generation, config, _text_config(config)))
    eos: Any = next((ids for ids in stated if ids is not None), [])
    eos_ids = eos if isinstance(eos, list) else [eos]
    are_ids = all(type(token) is int and 0 <= token <= _MOST_TOKENS for token in eos_ids)
    return tuple(eos_ids) if are_ids else ()


def context_of(model: str) -> int | None:
    """Tokens that a model on disk was made for, prompt and output together; None where it does not state them."""
    config = json_object(Path(model).expanduser() / "config.json") or {}
    positions = _text_config(config).get("max_position_embeddings")
    return positions if type(positions) is int and 0 < positions <= _MOST_TOKENS else None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration about text: that of a model for several media has one of its own."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where it cannot be read or is not an object."""
    try:
        document = read_json(path)
    except UnreadableError:
        return None
    return document if isinstance(document, dict) else None


def _refusal(kind: str, model: str, problem: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"engine {kind!r}: model {model!r} {problem}; name a directory with the model's config.json and weights: "
        "--set model=/path/to/model"
    )


Part: TypeAlias = Literal["value", "draft", "adapter"]
_OPTIONS: Final[dict[Part, str]] = {"value": "--value-model", "draft": "--draft", "adapter": "--lora"}


def pair_remedy(path: str, part: Part, key: str, *, is_base: bool = False) -> str:
    """The command that makes a small pair whose part (or base) is at ``path``.

    A command fills DIR/base and DIR/``part``. Where ``path`` is neither, or one of the two is there already, the
    words also say what to name in ``model`` and in ``key`` instead.
    """
    directory, command = Path(path), f"benchctl models make-tiny {_OPTIONS[part]}"
    pair = directory.parent
    is_taken = any(any((pair / each).expanduser().glob("*")) for each in ("base", part))
    if directory.name == ("base" if is_base else part) and not is_taken:
        return f"{command} {shlex.quote(str(pair))}"
    base, other = (shlex.quote(str(directory / each)) for each in ("base", part))
    return f"{command} {shlex.quote(path)} (then name {base} in model and {other} in {key})"
