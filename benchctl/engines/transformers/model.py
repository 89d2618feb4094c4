"""Limits of a model on disk that ``transformers serve`` must be told or does not check."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """``context`` in tokens and the ids that end a text; unknown and empty for a model that is not on disk."""

    context: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@lru_cache(maxsize=8)
def limits_of(model: str) -> ModelLimits:
    """The limits in ``generation_config.json`` and ``config.json`` of a directory; the former takes precedence."""
    directory = Path(model).expanduser()
    config, generation = _document(directory / "config.json"), _document(directory / "generation_config.json")
    text = config.get("text_config") or config
    context = text.get("max_position_embeddings")
    stated = (document.get("eos_token_id") for document in (generation, config, text))
    eos = next((ids for ids in stated if ids is not None), ())
    return ModelLimits(
        context=context if isinstance(context, int) else None,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
    )


def _document(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none to be read: the server itself will say what is wrong with it."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return document if isinstance(document, dict) else {}
