"""Lengths of prompts as a server will count them, by the tokenizer in its model's directory."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from benchctl.records.request import PreparedRequest

_TOKENIZER: Final = "tokenizer.json"


def counted_prompts(requests: Sequence[PreparedRequest], model: str) -> tuple[int, ...] | None:
    """Tokens of each prompt; None without such a directory, without the package ``tokenizers``, or for chats.

    The text of a chat depends on the model's template, which only its server applies.
    """
    path = Path(model) / _TOKENIZER
    prompts = [request.prompt for request in requests if request.prompt is not None]
    if len(prompts) < len(requests) or not path.is_file():
        return None
    try:
        tokenizers = import_module("tokenizers")
    except ImportError:
        return None
    encodings = tokenizers.Tokenizer.from_file(str(path)).encode_batch(prompts)
    return tuple(len(encoding.ids) for encoding in encodings)
