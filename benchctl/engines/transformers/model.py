"""What a model on disk says of itself, as far as ``transformers serve`` must be told it or does not check it."""

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
    """What ``config.json`` and ``generation_config.json`` of a directory state; the latter goes first."""
    directory = Path(model).expanduser()
    config, generation = _document(directory / "config.json"), _document(directory / "generation_config.json")
    text = config.get("text_config") or config
    context = text.get("max_position_embeddings")
    stated = (document.get("eos_token_id") for document in (generation, config, text))
    eos = next((found for found in stated if found is not None), ())
    return ModelLimits(
        context=context if isinstance(context, int) else None,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
    )


def _document(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none to be read: the server itself will say what is wrong with it."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}
