"""The reference of the result format as Markdown, from the record types: ``docs/reference/result-format.md``."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

from benchctl.docstrings import attribute_docstrings
from benchctl.records.claims.claims import Lease
from benchctl.records.directory import Submission
from benchctl.records.integrity.digests import BlockDigests, DirectoryDigests
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
from benchctl.records.stores.peaks_store import NoiseFloor
from benchctl.records.stores.stores import MeasuredPeaks


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
    _File("claims/b<block>-<n>.json", "The n-th claim of a block, where several processes measure.", Lease),
    _File("digests/b<block>-<n>.json", "Digests of the runs of a block, by the owner of that claim.", BlockDigests),
    _File("runs/<run_id>/", "One directory for each run that was begun, see below."),
    _File("summary.csv, summary.json", "Every metric of every run; written by reports."),
    _File("sweep_summary.csv, sweep_summary.json", "Every cell against the baseline; written by reports."),
    _File("nodes_summary.csv", "Every cell by node, where blocks ran on more than one; written by reports."),
    _File("plots/*.png, report.html", "Pictures and the page; written by reports."),
    _File("derived.json", "Digests of the files that the last report wrote."),
    _File(".verified.json", "Digests of earlier verifications, so that unchanged files are not hashed again."),
)
_RUN_FILES: Final = (
    _File("run.json", "The run: its server, times, state and warnings.", RunRecord),
    _File("requests.jsonl", "One line for each request, warm-up and load, as the client saw it.", RequestRecord),
    _File("requests.safetensors", "A copy of long requests that is read quickly; may be deleted."),
    _File("steps.jsonl", "One line for each step, normalised over engines.", StepRecord),
    _File("steps.safetensors", "A copy of a long step log that is read quickly; may be deleted."),
    _File("steps.raw.jsonl", "The engine's own log of its steps, untouched."),
    _File("client.jsonl", "Health of the load generator, ten times per second of the load.", ClientSample),
    _File("gpu.jsonl", "Samples of each visible GPU.", GpuSample),
    _File("host.jsonl", "Samples of the server's processes, the client and the host.", HostSample),
    _File("prometheus.jsonl", "Samples of the server's counters and gauges.", PrometheusSample),
    _File("server.json", "Facts that benchctl's part inside the server wrote, where there is one."),
    _File("server.log", "Output of the server's processes, without secrets."),
    _File("server.raw.log", "The same with secrets, of `benchctl run --keep-raw-logs`; not to be shared."),
    _File("result.json", "Summary in the key names of `vllm bench serve`; written by reports."),
    _File("attempt-<n>/", "Files of an earlier attempt that `--resume` replaced."),
)
_INTRODUCTION: Final = """\
# Result directory

The files that `benchctl run` writes to `results/<profile>/<utc>-<hash8>/`, from the record types in
`benchctl/records`. The format is version {version} (`schema_version`). An older directory is upgraded in memory
when it is opened; a newer one is refused.

* JSON documents are replaced atomically. JSON Lines (`.jsonl`) are appended, one flush per record.
* A field that is absent has its default; without a default it is unknown, never 0.
* Fields that end in `_ns` are integer nanoseconds of one monotonic clock of the measuring host. Those of steps
  follow the step's own `clock`. Fields that end in `_frac` are fractions, 1 for the whole.
* Failed requests stay in the data. A run that failed keeps all files that it has.
"""
_SECTIONS: Final = """\
## Sections of a step

The known names of `sections_ns`. Sections within one section are disjoint; the rest of its time has no name. An
engine may have sections with other names; reports show them apart, because no known section contains them.

| section | within |
|---|---|
"""
_WORDS: Final = {
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
    described: set[type[Record]] = set()
    parts = [_INTRODUCTION.format(version=SCHEMA_VERSION)]
    parts += ["## Files of an experiment\n", _file_table(_EXPERIMENT_FILES)]
    parts += ["## Files of a run\n", _file_table(_RUN_FILES)]
    for title, files in (("", _EXPERIMENT_FILES), ("runs/<run_id>/", _RUN_FILES)):
        for file in files:
            if file.record is not None:
                parts.append(f"## `{title}{file.name}`\n")
                parts += _record_sections(file.record, described, is_nested=False)
    rows = [f"| `{name}` | {f'`{parent}`' if parent else 'the step'} |" for name, parent in SECTION_PARENT.items()]
    return "\n".join([*parts, _SECTIONS + "\n".join(rows) + "\n"])


def _file_table(files: tuple[_File, ...]) -> str:
    rows = [f"| `{file.name.replace(', ', '`, `')}` | {file.meaning} |" for file in files]
    return "\n".join(["| file | content |", "|---|---|", *rows]) + "\n"


def _record_sections(record: type[Record], described: set[type[Record]], *, is_nested: bool) -> Iterator[str]:
    """The table of a record type, then those of the types in its fields that were not described before."""
    described.add(record)
    if is_nested:
        yield f"### `{record.__name__}`\n"
    yield inspect.cleandoc(record.__doc__ or "").replace("``", "`") + "\n"
    fields = msgspec.structs.fields(record)
    declaring = [each for each in reversed(record.__mro__) if issubclass(each, Record)]
    meanings = {name: text for each in declaring for name, text in attribute_docstrings(each).items()}
    rows = [_row(field, meanings[field.name]) for field in fields]
    yield "\n".join(["| field | type | unit | default | meaning |", "|---|---|---|---|---|", *rows]) + "\n"
    for nested in (nested for field in fields for nested in _records_in(field.type)):
        if nested not in described:
            yield from _record_sections(nested, described, is_nested=True)


def _row(field: msgspec.structs.FieldInfo, meaning: str) -> str:
    cells = (
        f"`{field.encode_name}`",
        _type_text(field.type),
        _UNITS.get(field.name.rpartition("_")[2], ""),
        _default_text(field),
        " ".join(meaning.replace("``", "`").replace("|", "&#124;").split()),
    )
    return f"| {' | '.join(cells)} |"


def _records_in(annotation: Any) -> Iterator[type[Record]]:  # annotations have no type
    if isinstance(annotation, type) and issubclass(annotation, Record):
        yield annotation
    for argument in get_args(annotation):
        yield from _records_in(argument)


def _type_text(annotation: Any) -> str:
    """An annotation in words; a null that means *unknown* is left out, because such a field is absent."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return f"`{annotation.__name__}`"
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}".replace("number", "numbers")
    if origin is dict:
        return f"mapping of names to {_type_text(arguments[1])}"
    if origin in {Union, UnionType}:
        return " or ".join(_type_text(argument) for argument in arguments if argument is not NoneType)
    raise TypeError(f"{annotation} has no words in the reference of the result format; add them to _type_text")


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if default is None:
        return ""
    return "its defaults" if isinstance(default, Record) else f"`{json.dumps(default)}`"
