"""The text of a new profile: one change against a baseline, with the lines that its writer will want to edit.

``new_profile`` writes it for a change of one of five kinds; the result stands alone and extends nothing.
"""

import json
import re
import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from benchctl.errors import UsageError
from benchctl.profile.engine_options import PLAIN_DIALECT, dialects, options_class
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Sampling
from benchctl.profile.request import RequestOptions

_SERVER: Final = "'server.*'"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
_PLAIN: Final = re.compile(r"(?:[A-Za-z]|\.{0,2}/)(?:[\w./+@-]|:(?!$))*")


class Change(StrEnum):
    """Kinds of change that a new profile can measure."""

    FLAG = "flag"
    BUILD = "build"
    SAMPLER = "sampler"
    MODEL = "model"
    SERVER = "server"


VALUES: Final = {
    Change.FLAG: "the option and its value, such as max_num_seqs=4, or a flag, such as --enforce-eager",
    Change.BUILD: "the interpreter or program of the new build, or of the old and the new one",
    Change.SAMPLER: "the field of requests and its value, such as top_k=50",
    Change.MODEL: "the other model",
    Change.SERVER: "the addresses of both servers, first that of the baseline",
}
"""Meaning of the values, by kind of change."""
NUM_VALUES: Final = {Change.BUILD: (1, 2), Change.MODEL: (1, 1), Change.SERVER: (2, 2)}
"""Fewest and most values, where these are limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewProfile:
    """The answers from which a profile is written."""

    name: str
    change: Change
    engine: str
    """Preset or kind; for two running servers their dialect."""
    kind: str
    """Kind of this engine."""
    model: str | None
    """Model of the baseline; None where running servers know theirs."""
    values: tuple[str, ...]
    """See ``VALUES``."""


def check_name(name: str) -> str:
    """The name of a profile, without the suffix of its file. Raises UsageError for one that no profile can have."""
    bare = name.removesuffix(".yaml").removesuffix(".yml")
    if not _NAME.fullmatch(bare):
        raise UsageError(f"NAME is {name!r}; write lower-case letters, digits, '.', '_' and '-', such as my-flag")
    return bare


_TEMPLATE: Final = """\
# {name}: a change against a baseline. Run it: benchctl run {name}.yaml
description: {description}
{engine}
{model}
blocks: 6                # the fewest that give a verdict; each {start}
workload:
  dataset: synthetic     # random words; real prompts: gsm8k, sharegpt, or custom with a path
  num_prompts: 16
  input_len: 256         # tokens of each prompt
  output_len: 64         # tokens of each output, so that both sides do equal work
  arrival: {{kind: closed-loop, max_concurrency: 8}}
{cache}variants:
  baseline: {baseline}
  changed: {changed}
{rest}"""
_CACHE: Final = "  allow_prefix_cache_hits: true # the caches of a server that is attached cannot be emptied\n"
_BYPASSED: Final = frozenset({"vllm", "sglang", "llamacpp"})
"""Dialects in which requests can keep the server from using its prefix cache."""


def new_profile(new: NewProfile) -> str:
    """The YAML of a profile. Raises UsageError for values that do not fit the kind of change or the engine."""
    _check_number(new)
    values, engine, model = " ".join(new.values), f"engine: {_text(new.engine)}", f"model: {_text(new.model or '')}"
    if new.change is Change.SERVER:
        served = {} if new.model is None else {"served_model": new.model}
        options = _flow({"url": new.values[0], "dialect": new.engine, **served})
        engine, model = f"engine: {{kind: attach, options: {options}}}", f"model: {_text(new.model or 'unknown')}"
        model = f"{model:<24} # a name whose shape benchctl knows also gives FLOPs"
        start = "loads both servers in turn"
    else:
        engine = f"{engine:<24} # a preset or kind; 'benchctl engines list' shows what is installed"
        model = f"{model:<24} # a directory, or a name that the engine can load"
        start = "starts both servers afresh"
    description = {
        Change.FLAG: f"{values} against the default of the server",
        Change.SAMPLER: f"{values} against the default of requests",
        Change.MODEL: f"{values} against {new.model}",
        Change.BUILD: "A new build against the old one",
        Change.SERVER: f"{new.values[-1]} against {new.values[0]}",
    }[new.change]
    keeps_cache = new.change is Change.SERVER and new.engine not in _BYPASSED
    baseline, changed, rest = _sides(new)
    return _TEMPLATE.format(
        name=new.name,
        description=_text(description),
        engine=engine,
        model=model,
        start=start,
        cache=_CACHE if keeps_cache else "",
        baseline=baseline,
        changed=changed,
        rest=rest,
    )


def _sides(new: NewProfile) -> tuple[str, str, str]:
    """The YAML of both variants, and what follows them: a sweep, and patterns of what may differ beside it."""
    value = _text(new.values[-1])
    if new.change is Change.FLAG:
        return "{}", f"{{server: {_server_options(new)}}}", ""
    if new.change is Change.SAMPLER:
        return "{}", _request_fields(new), ""
    if new.change is Change.MODEL:
        return "{}", "{}", f"sweep: {{model: [{value}]}}\n{_allowed('model', _SERVER)}"
    if new.change is Change.SERVER:
        return "{}", f"{{server: {{url: {value}}}}}", _allowed(_SERVER, "model")
    old, key = "{}", _build_key(new)
    if len(new.values) > 1:
        old = f"{{server: {{{key}: {_text(new.values[0])}}}}}"
    return old, f"{{server: {{{key}: {value}}}}}", _allowed(_SERVER)


def _allowed(*patterns: str) -> str:
    remark = "beside what the variants set; any other makes the comparison invalid"
    return f"allowed_differences: [{', '.join(patterns)}] # {remark}\n"


def _build_key(new: NewProfile) -> str:
    """The option that names a build of this engine. Raises UsageError for an engine without builds of its own."""
    options = options_class(new.kind).model_fields
    for key in ("binary", "python"):
        if key in options:
            return key
    raise UsageError(
        f"--change build: engine {new.engine!r} has one build; name another engine, such as --engine vllm, "
        "and the interpreters of two environments that have it"
    )


def _server_options(new: NewProfile) -> str:
    """Options of the server as a YAML mapping; words that begin with dashes go to its command line as they are."""
    options = options_class(new.kind).model_fields
    words: list[str] = []
    entries: list[str] = []
    for value in new.values:
        if value.startswith("-"):
            words += shlex.split(value)
            continue
        name, setting = _assignment(value)
        if name not in options:
            hint = did_you_mean(name, options) or f"it has {', '.join(options)}"
            flag = (
                "; a flag of the server itself is written --value='--flag value'" if "extra_args" in options else ""
            )
            raise UsageError(f"--value {value}: engine {new.engine!r} has no option {name!r}; {hint}{flag}")
        entries.append(f"{name}: {setting}")
    if words and "extra_args" not in options:
        raise UsageError(f"--value {' '.join(words)}: engine {new.engine!r} takes no flags; write an option=value")
    if words:
        entries.append(f"extra_args: [{', '.join(map(_text, words))}]")
    return f"{{{', '.join(entries)}}}"


def _request_fields(new: NewProfile) -> str:
    """Sampling parameters and fields of requests as the YAML of a variant."""
    sections: dict[str, list[str]] = {"sampling": [], "request": []}
    for value in new.values:
        name, setting = _assignment(value)
        if name in Sampling.model_fields:
            sections["sampling"].append(f"{name}: {setting}")
        elif name in RequestOptions.model_fields:
            sections["request"].append(f"{name}: {setting}")
        else:
            names = (*Sampling.model_fields, *RequestOptions.model_fields)
            hint = did_you_mean(name, names) or f"choose one of {', '.join(names)}"
            raise UsageError(f"--value {value}: requests have no field {name!r}; {hint}")
    written = [f"{key}: {{{', '.join(entries)}}}" for key, entries in sections.items() if entries]
    return f"{{{', '.join(written)}}}"


def _assignment(value: str) -> tuple[str, str]:
    name, equals, setting = value.partition("=")
    if not equals or not name.strip() or not setting.strip():
        raise UsageError(f"--value {value}: write NAME=VALUE, such as max_num_seqs=4")
    return name.strip(), setting.strip()


def _check_number(new: NewProfile) -> None:
    fewest, most = NUM_VALUES.get(new.change, (1, len(new.values)))
    if not fewest <= len(new.values) <= most:
        raise UsageError(
            f"--change {new.change} takes {fewest if fewest == most else f'{fewest} or {most}'} --value, and "
            f"{len(new.values)} are given: {VALUES[new.change]}"
        )
    if new.change is Change.SERVER and new.engine not in dialects():
        raise UsageError(
            f"--engine is {new.engine!r}; for running servers name their dialect, one of {', '.join(dialects())} "
            f"({PLAIN_DIALECT} where nothing more is known)"
        )


def _text(value: str) -> str:
    """A text as YAML, quoted unless it can only be read as text."""
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in {"null", "true", "false"}
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _flow(options: dict[str, str]) -> str:
    return f"{{{', '.join(f'{name}: {_text(value)}' for name, value in options.items())}}}"
