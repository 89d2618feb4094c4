"""The reference of profile keys as Markdown, from the models that validate them."""

import json
from collections.abc import Iterable
from itertools import groupby
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from benchctl.profile.choices import MAX_SEED, Section
from benchctl.profile.engine_options import ENGINES, flag_of
from benchctl.profile.keys import Key, option_keys, profile_keys
from benchctl.profile.settings import FACTOR_SETTINGS

_INTRODUCTION: Final = """\
# Profiles

A profile is the YAML that describes an experiment. `benchctl profiles list` shows those that are found by name: in
`./profiles`, then among the ones that benchctl carries. `benchctl profiles show NAME` prints one with all defaults
written out, and `benchctl profiles validate FILE` reports every error with its line.

## Writing one

* `extends: NAME` (or a path relative to the file) inherits everything from another profile except `name` and
  `description`. Mappings merge key by key; any other value replaces the inherited one. Set an inherited variant or
  factor to `null` to drop it.
* `engine` is the name of a preset in `engines/`, `{preset: NAME, options: {...}}` or `{kind: KIND, options:
  {...}}`. With `options` alone it adds to the inherited engine. `--engine NAME` replaces it.
* A preset may list substitutes under `models` for models that profiles name (`vllm-lenvm` does, for small
  machines); the experiment is then about the substitute.
* `--set path=value` changes any key for one call: `--set workload.num_prompts=3`.
* A variant lists only its differences: its `server`, `sampling`, `request` and `guidance` override
  `engine.options`, `sampling` and `request`. In `request`, null removes an inherited key. Names of variants are
  free; `baseline` names the one that all others are compared with.
* `sweep` gives a variant one cell for each combination of values; the baseline is never swept. A factor is a
  dotted path such as `sampling.min_p`, or one of the short names
  %s.
* `for_unguided_engines` holds keys that override others of its file when the engine in use cannot guide (`vllm`,
  `sglang`, `llamacpp`, `transformers`, `attach`), so that one profile serves both kinds.
* `per_engine.KIND` holds keys that override others of its file when the engine in use is of that kind
  (`topk-sweep` disables overlapped scheduling for SGLang's fork, which requires that, but not for vLLM).
* Guidance needs a server with a `value_model`, and in modes `centered_exp` and `value_bias` a finite `top_k`.
* Deprecated words of older versions still work; each use prints a warning with its line and the new word.
* The YAML is plain: keys are text and appear once, `yes` and `on` are text, and there are no aliases and no tags.

What a variant or a cell sets is declared by that, with what the option brings about on the server: options, flags
and variables of the server, the interpreter and its versions, `sampling`, `request` and `guidance`. Anything else
that differs makes a comparison invalid. `allowed_differences` lists settings that may differ although nobody set
them, as dotted paths (`server.speculative.*` covers all below it); a refused comparison names those that it needs.

## Identity

A result directory is named by its time and the first eight digits of a SHA-256 over the profile. The digest covers
every value, except descriptions and `cluster`, that differs from the default that its key had when it was
introduced. Writing out a default, or a newer benchctl with more keys, does not change the digest, so `--resume`
accepts directories of older versions; any other value does.

## Keys
"""

_WORDS: Final = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "null",
    Any: "any",
}
_LOWER: Final = {"ge": "from", "gt": "above"}
_UPPER: Final = {"le": "to", "lt": "and below"}


def profile_reference() -> str:
    """``docs/reference/profile.md``: how to write a profile, and every key with type, default and meaning."""
    factors = ", ".join(f"`{name}`" for name in FACTOR_SETTINGS)
    parts = [_INTRODUCTION % factors, _tables(profile_keys())]
    for kind in ENGINES:
        parts += [f"## Options of the engine `{kind}`\n", _tables(option_keys(kind))]
    return "\n".join(parts)


def _tables(keys: Iterable[Key]) -> str:
    """One table for each section, the sections in the order of their first key."""
    by_section = sorted(enumerate(keys), key=lambda item: (item[1].path.count("."), item[0]))
    return "\n".join(
        _table(section, [key for _, key in group])
        for section, group in groupby(by_section, key=lambda item: item[1].path.rpartition(".")[0])
    )


def _table(section: str, keys: Iterable[Key]) -> str:
    rows = [f"### `{section}`\n"] if section else []
    rows += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        name = key.path.rpartition(".")[2]
        meaning = " ".join(_with_flag(key).replace("``", "`").split())
        rows.append(f"| `{name}` | {_type_text(key.field)} | {_default_text(key.field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _with_flag(key: Key) -> str:
    """The meaning of an option, with its flag in brackets where that is spelled differently."""
    name, flag = key.path.rpartition(".")[2], flag_of(key.field)
    if flag is None or flag.name in {"", f"--{name.replace('_', '-')}"}:
        return key.meaning
    off = "off is " if flag.when is False else ""
    return f"{key.meaning.removesuffix('.')} ({off}``{flag.name}``)."


def _type_text(field: FieldInfo) -> str:
    return _with_range(_words(field.annotation), field.metadata)


def _with_range(words: str, metadata: Iterable[Any]) -> str:
    """The words of a number with its range: ``whole number from 1 to 65,536``."""
    limits = {name: value for each in metadata for name, value in _limits(each)}
    parts = [f"{word} {_number(limits[name])}" for name, word in (_LOWER | _UPPER).items() if name in limits]
    number, or_null, _ = words.partition(" or null")
    return " ".join((number, *parts)) + or_null


def _limits(limit: Any) -> Iterable[tuple[str, float]]:
    """The bounds that an entry of a field's metadata states, by name."""
    if isinstance(limit, FieldInfo):  # of a type with a range, inside another
        return [pair for each in limit.metadata for pair in _limits(each)]
    limits = ((name, getattr(limit, name, None)) for name in (*_LOWER, *_UPPER))
    return [(name, value) for name, value in limits if value is not None]


def _number(value: float) -> str:
    if value == MAX_SEED:
        return "2^63 - 1"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6f}".rstrip("0").rstrip(".")


def _words(annotation: Any) -> str:
    arguments = get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if get_origin(annotation) is tuple:
        return f"list of {_words(arguments[0])}"
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return _with_range(_words(arguments[0]), annotation.__metadata__)
    return " or ".join(_words(argument) for argument in arguments)


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, Section):
        return "its defaults"
    return f"`{json.dumps(field.default)}`"
