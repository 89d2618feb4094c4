"""The shape of a model by its name or its path."""

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchctl.costs.built_in_shapes import BUILT_IN_SHAPES
from benchctl.costs.config_json import shape_from_config
from benchctl.costs.model_shape import ModelShape, WeightFormat
from benchctl.errors import UsageError
from benchctl.untrusted.text import visible_value

__all__ = ["BUILT_IN_SHAPES", "ModelShape", "shape_for", "shape_from_config"]

_LENVM_NAME: Final = re.compile(r"lvm-.*-b-(?P<backbone>.+)")
"""Published value models are called ``lvm-…-a-<generator>-b-<backbone>``."""
_ADDITIONS: Final = re.compile(r"^meta-(?=llama)|-(instruct|chat|hf|base|v0\.\d|\d{4}|17b-\d+e)(?=-|$)")
"""Parts of a published name that do not change the dimensions."""
_QUANTISED: Final[tuple[tuple[re.Pattern[str], WeightFormat], ...]] = (
    (re.compile(r"-(gptq-)?int4$|-gptq$|-awq$|-quantized\.w4a16$"), "int4"),
    (re.compile(r"-(gptq-)?int8$|-quantized\.w8a16$"), "int8-stored"),
    (re.compile(r"-quantized\.w8a8$"), "int8"),
    (re.compile(r"-fp8(-dynamic)?$"), "fp8"),
    (re.compile(r"-nvfp4$"), "fp4"),
)
_SAME_DIMENSIONS: Final = {
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-v3.1": "deepseek-v3",
}


def shape_for(name_or_dir: str) -> ModelShape:
    """The shape of a built-in name or a path.

    A built-in name may be written as published, with its owner, ``-Instruct``, capitals and the format of its
    weights (``Qwen/Qwen2.5-7B-Instruct-AWQ``). A path names a directory with a config.json, that file, or a .gguf
    file in the same directory. A published value model is known by its name (``lvm-…-b-qwen2.5-1.5b-instruct``) and
    has a value head. Raises UsageError for anything else.
    """
    if name_or_dir in BUILT_IN_SHAPES:
        return BUILT_IN_SHAPES[name_or_dir]
    config = _config_of(name_or_dir)
    return _built_in(name_or_dir) if config is None else shape_from_config(config)


def _config_of(text: str) -> Path | None:
    """The config.json that a path means; None where there is none, as for a text that cannot be a path."""
    try:
        path = Path(text).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            path = path.parent
        config = path if path.is_file() else path / "config.json"
        return config if config.is_file() else None
    except (OSError, RuntimeError):  # a name too long; a home directory that nobody has
        return None


def _built_in(name: str) -> ModelShape:
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    if (shape := _by_published_name(short)) is not None:
        return shape
    match = _LENVM_NAME.fullmatch(short.removesuffix("-instruct"))
    if match and (backbone := _by_published_name(match["backbone"])) is not None:
        return replace(backbone.as_value_model(), name=match[0])
    nearest = difflib.get_close_matches(_ADDITIONS.sub("", short), BUILT_IN_SHAPES, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise UsageError(
        f"unknown model {visible_value(name)}: {hint}Built-in shapes are {', '.join(BUILT_IN_SHAPES)}; "
        "for any other model name a directory with its config.json"
    )


def _by_published_name(name: str) -> ModelShape | None:
    """The built-in shape of a name in lower case without owner."""
    weight_format: WeightFormat | None = None
    for pattern, stored_as in _QUANTISED:
        if pattern.search(name):
            name, weight_format = pattern.sub("", name), stored_as
    plain = _ADDITIONS.sub("", name)
    shape = BUILT_IN_SHAPES.get(_SAME_DIMENSIONS.get(plain, plain))
    return shape if shape is None or weight_format is None else replace(shape, weight_format=weight_format)
