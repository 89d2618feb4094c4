"""The text of a new profile: one change against a baseline, with the lines that its writer will want to edit.

``new_profile`` writes it for a change of one of five kinds, or for one running server as it is; the result stands
alone and extends nothing.
"""

import json
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from benchctl.errors import UsageError
from benchctl.profile.engine_table import ENGINES, PLAIN_DIALECT, dialects, options_class
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Sampling
from benchctl.profile.sections import RequestOptions

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
_MOST_OF_NAME: Final = 40
"""Characters of the name of a variant."""
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
    Change.BUILD: "the interpreter, program or directory for PYTHONPATH of the new build, or of both; with --repo "
    "the commits",
    Change.SAMPLER: "the field of requests and its value, such as top_k=50",
    Change.MODEL: "the other model",
    Change.SERVER: "the addresses of both servers, first that of the baseline",
}
"""Meaning of the values, by kind of change."""
NUM_VALUES: Final = {Change.BUILD: (1, 2), Change.SERVER: (2, 2)}
"""Fewest and most values, where these are limited."""
_PROGRAMS: Final = {"binary": "build/bin/llama-server", "python": ".venv/bin/python"}
"""Options that name a build, and where a checkout of the engine has what they name once it is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A file of prompts of one's own."""

    path: str
    num_rows: int
    has_output_lengths: bool
    """Every row says how long its output is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewProfile:
    """The answers from which a profile is written."""

    name: str
    change: Change | None
    """None for one running server that is measured as it is."""
    engine: str
    """Preset or kind; for two running servers their dialect."""
    kind: str
    """Kind of this engine."""
    model: str | None
    """Model of the baseline; None where running servers know theirs."""
    values: tuple[str, ...] = ()
    """See ``VALUES``; none for one running server that is measured as it is."""
    url: str | None = None
    """Address of the one running server; None where benchctl starts servers, or two are attached."""
    prompts: Prompts | None = None
    """None for random words."""
    commits: tuple[str, ...] = ()
    """Commits of which the values are builds."""


def new_name(name: str, *, is_replaced: bool) -> str:
    """The name of a new profile, without the suffix of its file.

    Raises UsageError for one that no profile can have, or whose file exists and may not be replaced.
    """
    bare = name.removesuffix(".yaml").removesuffix(".yml")
    if not _NAME.fullmatch(bare):
        raise UsageError(f"NAME is {name!r}; write lower-case letters, digits, '.', '_' and '-', such as my-flag")
    if Path(f"{bare}.yaml").exists() and not is_replaced:
        raise UsageError(f"{bare}.yaml exists; choose another name, or replace it with --force")
    return bare


_CONCURRENCY: Final = 8
_TEMPLATE: Final = """\
# {name}: {title}. Run it: benchctl run {name}
description: {description}
{engine}
{model}
blocks: 6                # the fewest that give a verdict; each {start}
workload:
{prompts}
  arrival: {{kind: closed-loop, max_concurrency: {concurrency}}}
{cache}variants:
{variants}
{rest}"""
_SYNTHETIC: Final = """\
  dataset: synthetic     # random words; prompts of your own: 'benchctl init --prompts FILE'
  num_prompts: {num_prompts:<9} # more scatter less, and cost little beside the start of a server
  input_len: 256         # tokens of each prompt
  output_len: {output_len:<10} # tokens of each output, so that both sides do equal work"""
_OWN: Final = """\
  dataset: custom        # prompts of your own
  path: {path}
  num_prompts: {num_rows:<11} # all rows of the file
  output_len: {output_len:<12} # {remark}"""
_CACHE: Final = "  allow_prefix_cache_hits: true # the caches of a server that is attached cannot be emptied\n"
_STARTS: Final[dict[Change | None, str]] = {Change.SERVER: "loads both servers in turn"}
_ALLOWED: Final = {
    Change.BUILD: "'server.*'",
    Change.MODEL: "model, 'server.*'",
    Change.SERVER: "'server.*', model",
    None: "'server.*'",
}
"""Patterns of what may differ beside what the variants set; any other difference makes a comparison invalid."""


def new_profile(new: NewProfile, tokens_of_start: float = 0.0) -> str:
    """The YAML of a profile, whose load lasts at least as long as a start, in tokens of a sequence.

    Raises UsageError for values that do not fit the kind of change or the engine.
    """
    _check_values(new)
    variants = _variants(new)
    values, is_attached = " ".join(new.values), new.url is not None or new.change is Change.SERVER
    description = {
        Change.FLAG: f"{values} against the default of the server",
        Change.SAMPLER: f"{values} against the default of requests",
        Change.MODEL: f"{values} against {new.model}",
        Change.BUILD: " against ".join(reversed(new.commits)) or "A new build against the old one",
        Change.SERVER: " against ".join(reversed(new.values)),
        None: f"The server at {new.url} as it is",
    }[new.change]
    engine, model = (
        f"engine: {_text(new.engine)}",
        f"model: {_text(new.model or ('unknown' if is_attached else ''))}",
    )
    engine = f"{engine:<24} # a preset or kind; 'benchctl engines list' shows what is installed"
    remark = "a directory, or a name that the engine can load"
    if is_attached:
        served = f", served_model: {_text(new.model)}" if new.model else ""
        url, remark = _text(new.url or new.values[0]), "a name whose shape benchctl knows also gives FLOPs"
        engine = f"engine: {{kind: attach, options: {{url: {url}, dialect: {_text(new.engine)}{served}}}}}"
    rest = f"sweep: {{model: [{', '.join(map(_text, new.values))}]}}\n" if new.change is Change.MODEL else ""
    if new.change in _ALLOWED:
        remark_of_rest = "beside what the variants set; any other makes the comparison invalid"
        rest += f"allowed_differences: [{_ALLOWED[new.change]}] # {remark_of_rest}\n"
    return _TEMPLATE.format(
        name=new.name,
        title="a server as it is" if new.change is None else "a change against a baseline",
        description=_text(description),
        engine=engine,
        model=f"{model:<24} # {remark}",
        start=_STARTS.get(new.change, "sends every load once") if is_attached else "starts every server afresh",
        prompts=_random_prompts(new, tokens_of_start) if new.prompts is None else _own_prompts(new.prompts),
        concurrency=_CONCURRENCY,
        cache=_CACHE if is_attached and not (new.engine in ENGINES and ENGINES[new.engine].cache_bypass) else "",
        variants="\n".join(f"  {name}: {settings}" for name, settings in variants.items()),
        rest=rest,
    )


def _random_prompts(new: NewProfile, tokens_of_start: float) -> str:
    """A small load for a simulator, a larger one for an engine: as long as its start where that is known."""
    num_prompts, output_len = (16, 64) if ENGINES[new.kind].is_virtual else (64, 128)
    number = max(num_prompts, _CONCURRENCY * math.ceil(tokens_of_start / output_len))
    return _SYNTHETIC.format(num_prompts=number, output_len=output_len)


def _own_prompts(prompts: Prompts) -> str:
    length, remark = (
        ("null", "rows have their own") if prompts.has_output_lengths else ("64", "tokens of each output")
    )
    return _OWN.format(path=_text(prompts.path), num_rows=prompts.num_rows, output_len=length, remark=remark)


def _check_values(new: NewProfile) -> None:
    fewest, most = (0, 0) if new.change is None else NUM_VALUES.get(new.change, (1, len(new.values)))
    if not fewest <= len(new.values) <= most:
        raise UsageError(
            f"--change {new.change} takes {fewest if fewest == most else f'{fewest} or {most}'} --value, and "
            f"{len(new.values)} are given: {VALUES[new.change or Change.SAMPLER]}"
        )
    if new.url is not None and new.change not in {None, Change.SAMPLER}:
        raise UsageError(
            f"--url {new.url} with --change {new.change}: that changes where the server is started; leave out "
            "--change and --value, and measure the server before and after"
        )


def check_dialect(name: str) -> str:
    """The dialect of running servers. Raises UsageError for any other name."""
    if name not in dialects():
        raise UsageError(
            f"--engine is {name!r}; for running servers name their dialect, one of {', '.join(dialects())} "
            f"({PLAIN_DIALECT} where nothing more is known)"
        )
    return name


def _variants(new: NewProfile) -> dict[str, str]:
    """The YAML of each variant by its name, the baseline first."""
    sections: dict[Change | None, Mapping[str, Collection[str]]] = {
        Change.FLAG: {"server": options_class(new.kind).model_fields},
        Change.SAMPLER: {"sampling": Sampling.model_fields, "request": RequestOptions.model_fields},
    }
    if new.change is None:
        return {"baseline": "{}"}
    if new.change in sections:
        return {"baseline": "{}"} | _settings(new, sections[new.change])
    if new.change is Change.MODEL:
        return {"baseline": "{}", "other-model": "{}"}
    if new.change is Change.SERVER:
        return {"baseline": "{}", "other-server": f"{{server: {{url: {_text(new.values[-1])}}}}}"}
    key, _ = build_option(new.engine, new.kind)
    settings = [
        f"env: {{PYTHONPATH: {_text(path)}}}" if Path(path).is_dir() else f"{key}: {_text(path)}"
        for path in new.values
    ]
    old = f"{{server: {{{settings[0]}}}}}" if len(settings) > 1 else "{}"
    name = f"commit-{_slug(new.commits[-1])}" if new.commits else "new-build"
    return {"baseline": old, name: f"{{server: {{{settings[-1]}}}}}"}


def build_option(engine: str, kind: str) -> tuple[str, str]:
    """The option that names a build, and the usual path of one in a checkout. Raises UsageError where none does."""
    for option, program in _PROGRAMS.items():
        if option in options_class(kind).model_fields:
            return option, program
    raise UsageError(
        f"--change build: engine {engine!r} has one build; name another engine, such as --engine vllm, and the "
        "interpreters of two environments that have it"
    )


def _settings(new: NewProfile, sections: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The YAML of a variant by its name: one with all values, or one for each value of a single option.

    Each value stands in the section that has its key; words that begin with dashes go to a server's command line as
    they are. Raises UsageError for any other key.
    """
    lists = [_choices(value) for value in new.values]
    if len(lists) > 1 and any(len(choices) > 1 for choices in lists):
        raise UsageError(f"--value {' '.join(new.values)}: several values of one option only; leave the others out")
    of_variants = [(choice,) for choice in lists[0]] if len(lists) == 1 else [new.values]
    return {_slug(values[0]): _variant(new, values, sections) for values in of_variants}


def _choices(value: str) -> list[str]:
    """``a=1,2`` as ``a=1`` and ``a=2``; a list or a mapping in YAML and words for a command line are one value."""
    name, equals, setting = value.partition("=")
    if value.startswith("-") or setting.lstrip().startswith(("[", "{", '"', "'")):
        return [value]
    return [f"{name}{equals}{part}" for part in setting.split(",")]


def _slug(value: str) -> str:
    """The name of a variant: ``max_num_seqs-4``."""
    return re.sub(r"[^a-z0-9_.]+", "-", value.lower()).strip("-._")[:_MOST_OF_NAME] or "changed"


def _variant(new: NewProfile, values: Sequence[str], sections: Mapping[str, Collection[str]]) -> str:
    names = [name for keys in sections.values() for name in keys]
    entries: dict[str, list[str]] = {section: [] for section in sections}
    words: list[str] = []
    for value in values:
        name, equals, setting = (part.strip() for part in value.partition("="))
        if value.startswith("-") and new.change is Change.FLAG:
            try:
                words += shlex.split(value)
            except ValueError as error:
                raise UsageError(f"--value {value}: {error}; write words as a shell splits them") from error
        elif not (equals and name and setting):
            raise UsageError(f"--value {value}: write NAME=VALUE, such as max_num_seqs=4")
        elif name not in names:
            hint = did_you_mean(name, names) or f"choose one of {', '.join(names)}"
            hint += "; a flag of the server itself is written --value='--flag value'" * ("extra_args" in names)
            lacking = f"engine {new.engine!r} has no option" if len(sections) == 1 else "requests have no field"
            raise UsageError(f"--value {value}: {lacking} {name!r}; {hint}")
        else:
            entries[next(section for section, keys in sections.items() if name in keys)].append(
                f"{name}: {setting}"
            )
    if words and "extra_args" not in names:
        raise UsageError(f"--value {' '.join(words)}: engine {new.engine!r} takes no flags; write an option=value")
    if words:
        entries["server"].append(f"extra_args: [{', '.join(map(_text, words))}]")
    written = [f"{section}: {{{', '.join(own)}}}" for section, own in entries.items() if own]
    return f"{{{', '.join(written)}}}"


def _text(value: str) -> str:
    """A text as YAML, quoted unless it can only be read as text."""
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in {"null", "true", "false"}
    return value if is_plain else json.dumps(value, ensure_ascii=False)
