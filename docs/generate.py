"""Write the pages of ``docs/reference``, which follow from the code: ``python docs/generate.py``."""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
import typer
from pydantic.fields import FieldInfo

from benchctl.analysis.metrics.table import ACROSS_LOADS, METRICS
from benchctl.cli.app import COMMANDS, load_command
from benchctl.cluster.progress import Progress
from benchctl.profile.bounds import MAX_SEED
from benchctl.profile.choices import Section, flag_of
from benchctl.profile.engine_table import ENGINES, options_class
from benchctl.profile.errors import Key, profile_keys
from benchctl.profile.settings import FACTOR_SETTINGS
from benchctl.records.directory import Submission
from benchctl.records.integrity import DirectoryDigests
from benchctl.records.peaks import MeasuredPeaks
from benchctl.records.record import Manifest, Plan, PreparedRequest, RequestRecord, RunRecord
from benchctl.records.schema import (
    SCHEMA_VERSION,
    SECTION_PARENT,
    ClientSample,
    GpuSample,
    HostSample,
    PrometheusSample,
    Record,
    StepRecord,
)
from benchctl.records.stores import NoiseFloor
from benchctl.records.warning_codes import CHECKS, FINDINGS, WARNING_TABLE
from benchctl.records.writers import Owner

_METRICS_INTRODUCTION: Final = """\
# Metrics

Every derived number, from `benchctl/analysis/metrics/table.py`. *Better* is the direction that counts as an
improvement; a dash means that neither does. A metric whose needs are not met is unknown (absent), never 0.

Durations that the client saw are multiplied by `time_scale` if the engine's clock is virtual, so that they
compare with its steps; `client_wall_s`, `ready_s` and `warmup_s` are not.

| metric | unit | formula | better | needs |
|---|---|---|---|---|
"""


def command_reference() -> str:
    """Every command with its arguments and options, as ``--help`` prints them."""
    introduction = "# Commands\n\nWhat `benchctl COMMAND --help` prints, on one page.\n"
    lines = [
        line for name in sorted(COMMANDS) for line in _command_sections(load_command(name), f"benchctl {name}")
    ]
    return "\n".join([introduction, *lines])


def _command_sections(command: Any, path: str) -> Iterator[str]:  # a click class, vendored by newer typer
    if hasattr(command, "commands"):
        for name, nested in sorted(command.commands.items()):
            yield from _command_sections(nested, f"{path} {name}")
        return
    context = typer.Context(command, info_name=path)
    usage = " ".join(["benchctl", *path.split()[1:], *command.collect_usage_pieces(context)])
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in filter(None, records)]
    yield f"## {path}\n"
    yield f"    {usage}\n"
    yield "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")) + "\n"
    if rows:
        yield "| argument or option | meaning |\n|---|---|"
        yield "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def metrics_reference() -> str:
    """Every metric with unit, formula, better direction and needs."""
    rows = []
    for metric in (METRICS | ACROSS_LOADS).values():
        better = "-" if metric.direction == "none" else metric.direction
        rows.append(f"| `{metric.name}` | {metric.unit} | {_cell(metric.formula)} | {better} | {metric.needs} |")
    return _METRICS_INTRODUCTION + "\n".join(rows) + "\n"


_PROFILE_INTRODUCTION: Final = """\
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
* `sweep` gives a variant one cell for each combination of values; the baseline is swept with `sweep_baseline` only.
  A factor is a dotted path such as `sampling.min_p`, or one of the short names
  %s.
* The last four are load factors: they say which load a server gets and apply to every variant, baseline and
  controls included; arms are compared under the same load. `per_server: ladder` sends all loads to one server of
  each arm.
* `for_unguided_engines` holds keys that override others of its file when the engine in use cannot guide (`vllm`,
  `sglang`, `llamacpp`, `transformers`, `attach`), so that one profile serves both kinds.
* `per_engine.KIND` holds keys that override others of its file when the engine in use is of that kind
  (`topk-sweep` disables overlapped scheduling for SGLang's fork, which requires that, but not for vLLM).
* Guidance needs a server with a `value_model`, and in modes `centered_exp` and `value_bias` a finite `top_k`.
* The YAML is plain: keys are text and appear once, `yes` and `on` are text, and there are no aliases and no tags.

The sides of a comparison may differ in what a variant or a cell sets, and in what that changes on the server:
options, flags and variables, the interpreter and its versions, `sampling`, `request` and `guidance`. Anything else
that differs makes a comparison invalid. `allowed_differences` lists settings that may differ although nobody set
them, as dotted paths (`server.speculative.*` covers all below it); a refused comparison names those that it needs.

## Identity

A result directory is named by its time and the first eight digits of a SHA-256 over the profile. The digest covers
every value, except descriptions and `cluster`, that differs from the default of its key. Writing out a default, or
a newer benchctl with more keys, does not change the digest, so `--resume` accepts directories of older versions;
any other value does.

## Keys
"""

_KEY_WORDS: Final = {
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
    parts = [_PROFILE_INTRODUCTION % factors, _key_tables(profile_keys())]
    for kind in ENGINES:
        parts += [f"## Options of the engine `{kind}`\n", _key_tables(option_keys(kind))]
    return "\n".join(parts)


@cache
def _meanings(declaring: type) -> dict[str, str]:
    """The text below each annotated attribute that a class and its bases declare, as far as they have source."""
    texts: dict[str, str] = {}
    for each in reversed(declaring.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):  # made while running, or built in
            continue
        (definition,) = ast.parse(source).body
        for declared, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
            match declared, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
    return texts


def option_keys(kind: str) -> tuple[Key, ...]:
    """The options of one engine."""
    return tuple(profile_keys(options_class(kind), "engine.options."))


def meaning_of(key: Key) -> str:
    """The meaning of a key of a profile."""
    return key.field.description or _meanings(key.section).get(key.path.rpartition(".")[2], "")


def _key_tables(keys: Iterable[Key]) -> str:
    """One table for each section, the sections in the order of their first key."""
    by_section = sorted(enumerate(keys), key=lambda item: (item[1].path.count("."), item[0]))
    return "\n".join(
        _key_table(section, [key for _, key in group])
        for section, group in groupby(by_section, key=lambda item: item[1].path.rpartition(".")[0])
    )


def _key_table(section: str, keys: Iterable[Key]) -> str:
    rows = [f"### `{section}`\n"] if section else []
    rows += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        name = key.path.rpartition(".")[2]
        meaning = " ".join(_with_flag(key).replace("``", "`").split())
        rows.append(f"| `{name}` | {_key_type(key.field)} | {_key_default(key.field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _with_flag(key: Key) -> str:
    """The meaning of an option, with its flag in brackets where that is spelled differently."""
    name, flag = key.path.rpartition(".")[2], flag_of(key.field)
    if flag is None or flag.name in {"", f"--{name.replace('_', '-')}"}:
        return meaning_of(key)
    off = "off is " if flag.when is False else ""
    return f"{meaning_of(key).removesuffix('.')} ({off}``{flag.name}``)."


def _key_type(field: FieldInfo) -> str:
    return _with_range(_key_words(field.annotation), field.metadata)


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


def _key_words(annotation: Any) -> str:
    arguments = get_args(annotation)
    if annotation in _KEY_WORDS:
        return _KEY_WORDS[annotation]
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if get_origin(annotation) is tuple:
        return f"list of {_key_words(arguments[0])}"
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return _with_range(_key_words(arguments[0]), annotation.__metadata__)
    return " or ".join(_key_words(argument) for argument in arguments)


def _key_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, Section):
        return "its defaults"
    return f"`{json.dumps(field.default)}`"


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a result directory; ``record`` is the type of its document, or of each of its lines."""

    name: str
    meaning: str
    record: type[Record] | None = None


_EXPERIMENT_FILES: Final = (
    _File("manifest.json", "The experiment: profile, request set, machine and state.", Manifest),
    _File("profile.yaml", "The resolved profile; the directory's name ends with the start of its SHA-256."),
    _File("plan.json", "The ordered runs.", Plan),
    _File(
        "requests.jsonl", "The prepared request set, byte-identical for the same profile and seed.", PreparedRequest
    ),
    _File("noise.json", "The noise floor on file for this machine, server and model at the start.", NoiseFloor),
    _File(
        "peaks.json",
        "The measured peaks of its device on file at the start, in place of its data sheet.",
        MeasuredPeaks,
    ),
    _File("digests.json", "SHA-256 of the files of the experiment.", DirectoryDigests),
    _File(
        "submissions/<utc>/submission.json",
        "One submission of blocks to Slurm, beside its script, its tasks and their logs.",
        Submission,
    ),
    _File("blocks/b<block>/owner.json", "The process of a block, where several processes measure.", Owner),
    _File("runs/<run_id>/", "One directory for each run that was begun, see below."),
    _File("summary.csv, summary.json", "Every metric of every run; written by reports."),
    _File("sweep_summary.csv, sweep_summary.json", "Every cell against the baseline; written by reports."),
    _File("nodes_summary.csv", "Every cell by node, where blocks ran on more than one; written by reports."),
    _File("curves.csv", "Every arm over its load with the knee, where one was swept; written by reports."),
    _File("plots/*.png, report.html", "Pictures and the page; written by reports."),
    _File("derived.json", "Digests of the files that the last report wrote."),
)
_RUN_FILES: Final = (
    _File("run.json", "The run: its server, times, state and warnings.", RunRecord),
    _File("requests.jsonl", "One line for each request, warm-up and load, as the client saw it.", RequestRecord),
    _File("steps.jsonl", "One line for each step, normalised over engines.", StepRecord),
    _File("steps.raw.jsonl", "The engine's own log of its steps, untouched."),
    _File("client.jsonl", "Health of the load generator, ten times per second of the load.", ClientSample),
    _File("gpu.jsonl", "Samples of each visible GPU.", GpuSample),
    _File("host.jsonl", "Samples of the server's processes, the client and the host.", HostSample),
    _File("prometheus.jsonl", "Samples of the server's counters and gauges.", PrometheusSample),
    _File(
        "server.json",
        "Facts that benchctl's part inside the server wrote; the settings of a simulated server.",
    ),
    _File("server.log", "Output of the server's processes, without secrets."),
    _File("server.raw.log", "The same with secrets, of `benchctl run --keep-raw-logs`; not to be shared."),
    _File("result.json", "Summary in the key names of `vllm bench serve`; written by reports."),
    _File(
        "requests-2.jsonl, steps-2.jsonl, …",
        "The same of the second of several loads (`loads_per_server`, `per_server: ladder`), and so on; "
        "`requests.jsonl` has the first.",
    ),
    _File("attempt-<n>/", "Files of an earlier attempt that `--resume` replaced."),
)
_RESULT_INTRODUCTION: Final = """\
# Result directory

The files that `benchctl run` writes to `results/<profile>/<utc>-<hash8>/`, from the record types in
`benchctl/records`. The format is version {version} (`schema_version`). A directory of another version is
refused.

* JSON documents are replaced atomically. JSON Lines (`.jsonl`) are appended, one flush per record.
* A field that is absent has its default; without a default it is unknown, never 0.
* Fields that end in `_ns` are integer nanoseconds of one monotonic clock of the measuring host. Those of steps
  follow the step's own `clock`. Fields that end in `_frac` are fractions, 1 for the whole.
* Failed requests stay in the data. A run that failed keeps all files that it has.
"""
_WATCH: Final = """\
## The document of `benchctl watch`

What `--json` prints, in one line after each change. Fields that are not known are null.
"""
_SECTIONS: Final = """\
## Sections of a step

The known names of `sections_ns`. Sections within one section are disjoint; the rest of its time has no name. An
engine may have sections with other names; reports show them apart, because no known section contains them.

| section | within |
|---|---|
"""
_RECORD_WORDS: Final = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "null",
    Any: "any value",
}
_UNITS: Final = {
    "ns": "ns",
    "bytes": "bytes",
    "tokens": "tokens",
    "hz": "Hz",
    "w": "W",
    "j": "J",
    "c": "°C",
    "frac": "fraction",
    "cores": "cores",
}
"""Unit by the last word of a field's name."""


def result_format_reference() -> str:
    """``docs/reference/result-format.md``: every file of a result directory, and every field of every record."""
    described: set[type[msgspec.Struct]] = set()
    parts = [_RESULT_INTRODUCTION.format(version=SCHEMA_VERSION)]
    parts += ["## Files of an experiment\n", _file_table(_EXPERIMENT_FILES)]
    parts += ["## Files of a run\n", _file_table(_RUN_FILES)]
    for title, files in (("", _EXPERIMENT_FILES), ("runs/<run_id>/", _RUN_FILES)):
        for file in files:
            if file.record is not None:
                parts.append(f"## `{title}{file.name}`\n")
                parts += _record_sections(file.record, described, is_nested=False)
    rows = [f"| `{name}` | {f'`{parent}`' if parent else 'the step'} |" for name, parent in SECTION_PARENT.items()]
    parts += [_SECTIONS + "\n".join(rows) + "\n", _WATCH, *_record_sections(Progress, described, is_nested=False)]
    return "\n".join(parts)


def _file_table(files: tuple[_File, ...]) -> str:
    rows = [f"| `{file.name.replace(', ', '`, `')}` | {file.meaning} |" for file in files]
    return "\n".join(["| file | content |", "|---|---|", *rows]) + "\n"


def _record_sections(
    record: type[msgspec.Struct], described: set[type[msgspec.Struct]], *, is_nested: bool
) -> Iterator[str]:
    """The table of a record type, then those of the types in its fields that were not described before."""
    described.add(record)
    if is_nested:
        yield f"### `{record.__name__}`\n"
    yield inspect.cleandoc(record.__doc__ or "").replace("``", "`") + "\n"
    fields = msgspec.structs.fields(record)
    meanings = _meanings(record)
    rows = [_field_row(field, meanings[field.name]) for field in fields]
    yield "\n".join(["| field | type | unit | default | meaning |", "|---|---|---|---|---|", *rows]) + "\n"
    for nested in (nested for field in fields for nested in _records_in(field.type)):
        if nested not in described:
            yield from _record_sections(nested, described, is_nested=True)


def _field_row(field: msgspec.structs.FieldInfo, meaning: str) -> str:
    cells = (
        f"`{field.encode_name}`",
        _field_type(field.type),
        _UNITS.get(field.name.rpartition("_")[2], ""),
        _field_default(field),
        " ".join(meaning.replace("``", "`").replace("|", "&#124;").split()),
    )
    return f"| {' | '.join(cells)} |"


def _records_in(annotation: Any) -> Iterator[type[msgspec.Struct]]:  # annotations have no type
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for argument in get_args(annotation):
        yield from _records_in(argument)


def _field_type(annotation: Any) -> str:
    """An annotation in words; a null that means *unknown* is left out, because such a field is absent."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if annotation in _RECORD_WORDS:
        return _RECORD_WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return f"`{annotation.__name__}`"
    if origin is Annotated:
        return _field_type(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"list of {_field_type(arguments[0])}".replace("number", "numbers")
    if origin in {dict, Mapping}:
        return f"mapping of names to {_field_type(arguments[1])}"
    if origin in {Union, UnionType}:
        return " or ".join(_field_type(argument) for argument in arguments if argument is not NoneType)
    raise TypeError(f"{annotation} has no words in the reference of the result format; add them to _field_type")


def _field_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if default is None:
        return ""
    return "its defaults" if isinstance(default, Record) else f"`{json.dumps(default)}`"


def warnings_reference() -> str:
    """Return ``docs/reference/warnings.md``: every code with severity, meaning and remedy."""
    return "\n".join(_warning_lines()) + "\n"


def _warning_lines() -> Iterator[str]:
    yield "# Warnings, checks and findings"
    yield ""
    yield "<!-- Generated from benchctl/records/warning_codes.py; do not edit. -->"
    yield ""
    yield "Each warning has a code, which is stable, and a message, which names the numbers. Severities:"
    yield ""
    yield "- **suspect**: the run does not count as done. Where only the client's times are affected, what the"
    yield "  server measured (steps, tokens) still counts; `--allow-suspect` counts all of it."
    yield "- **warning**: limits what may be concluded."
    yield "- **note**: for information; the measurement is unaffected."
    for topic, entries in WARNING_TABLE.items():
        yield from ("", f"## {topic}", "", "| code | severity | meaning | what to do |", "|---|---|---|---|")
        for code, entry in entries.items():
            severity = f"{entry.severity}, client times only" if entry.limits_client_times else entry.severity
            yield f"| `{code}` | {severity} | {entry.meaning} | {entry.remedy} |"
    yield from ("", "## Reconciliation checks", "")
    yield "Each check compares two independent records of a run. A fatal one that fails makes the run suspect"
    yield "(`check-failed`); any other that fails is a warning of a comparison."
    yield from ("", "| check | holds when |", "|---|---|")
    yield from (f"| `{name}` | {meaning} |" for name, meaning in CHECKS.items())
    yield from ("", "## Findings", "")
    yield "Conclusions that the numbers support, in the findings list of a report."
    yield from ("", "| code | meaning |", "|---|---|")
    yield from (f"| `{code}` | {meaning} |" for code, meaning in FINDINGS.items())


PAGES: Final[dict[str, Callable[[], str]]] = {
    "commands": command_reference,
    "metrics": metrics_reference,
    "profile": profile_reference,
    "result-format": result_format_reference,
    "warnings": warnings_reference,
}
"""Pages by name, with the function that returns the text."""


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (Path(__file__).parent / "reference" / f"{name}.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
