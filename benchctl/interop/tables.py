"""Tables as CSV or JSON Lines: of engine steps, one row a step, and of the server's own timestamps of requests.

Each quantity of a step has a name of ours, that of a step record, and names of other tools (``COLUMNS``). The time
of a step is ``dur_ns``, ``duration_us`` or ``cycle_us``, the time from the start of a step to that of the next.

``step.duration_us`` of vLLM's traces is refused as the time of a step: it is that of the scheduler alone, 0.7 ms
for a step of 2,046 tokens whose FLOPs alone take 70 ms. And a ``cycle_us`` belongs to its own step only while
batches change little: an asynchronous engine starts a step before the one before it has ended, so the time of a
long prompt appears in a neighbouring row. ``prev.prefill`` and ``next.batch.prefill_tokens`` mark such rows.

A request has ``arrived``, ``queued``, ``finished`` and ``departed``, each with ``_ts`` or ``_at`` in seconds or
``_us`` in microseconds, and ``output_tokens``.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.errors import UsageError
from benchctl.steptime.work import (
    CACHE_FULL_FRAC,
    Deployment,
    Flags,
    Floats,
    ObservedSteps,
    Origin,
    count_step_work,
    first_reasons,
)
from benchctl.units import NS_PER_US
from benchctl.untrusted import ROWS_BYTES, VALUE_CHARS
from benchctl.untrusted.files import (
    DECODING_ERRORS,
    UnreadableError,
    decoding_problem,
    read_csv_records,
    read_lines,
)
from benchctl.untrusted.text import visible_line, visible_value

Row: TypeAlias = Mapping[str, Any]
SUFFIXES: Final = frozenset({".csv", ".jsonl", ".ndjson"})
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "run": ("run", "run_id", "experiment_id"),
    "model": ("model",),
    "hardware": ("hardware",),
    "tensor_parallel": ("tensor_parallel", "tp"),
    "duration": ("dur_ns", "duration_us", "cycle_us"),
    "num_seqs": ("num_seqs",),
    "num_prefills": ("num_prefills", "batch.num_prefill_reqs"),
    "num_decodes": ("num_decodes", "batch.num_decode_reqs"),
    "prefill_tokens": ("num_prefill_tokens", "prefill_tokens", "batch.prefill_tokens"),
    "decode_tokens": ("num_decode_tokens", "decode_tokens", "batch.decode_tokens"),
    "context_tokens": ("context_tokens", "ctx_tokens"),
    "output_tokens": ("output_tokens",),
    "preempted": ("preempted", "batch.num_preempted"),
    "cache_frac": ("kv_used_frac", "kv.usage_gpu_ratio"),
    "previous_prefill": ("prev.prefill",),
    "next_prefill": ("next.batch.prefill_tokens",),
    "is_warmup": ("is_warmup",),
}
"""Names that each quantity may have, ours first."""
_SCHEDULER_TIME: Final = "step.duration_us"
_WORDS: Final = {"true": 1.0, "false": 0.0}
_MOST: Final = 2.0**53
"""Largest whole number that is exact here; no time in ns and no count of a step is near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDefaults:
    """Values for a table without the columns of these names."""

    model: str | None = None
    hardware: str | None = None
    tensor_parallel: int = 1
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Shapes of models by their names in the table: built-in names or paths."""


def is_step_table(path: Path) -> bool:
    return path.is_file() and path.suffix in SUFFIXES


def read_step_table(path: Path, defaults: TableDefaults) -> tuple[ObservedSteps, ...]:
    """The steps of each run of a table, in its order. Raises UsageError naming every column that is missing."""
    rows = read_rows(path)
    columns = dict.fromkeys(name for row in rows for name in row)
    names = {
        quantity: next(name for name in options if name in columns)
        for quantity, options in COLUMNS.items()
        if any(name in columns for name in options)
    }
    _check_columns(path, columns, names, defaults)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    keys = [names[key] for key in ("run", "model", "tensor_parallel", "hardware") if key in names]
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(str(row.get(key)) for key in keys), []).append(row)
    return tuple(_StepTable(path, of_run, names, defaults).observed(sha256) for of_run in runs.values())


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``.csv`` file, whose values are text and None for an empty one, or of JSON Lines.

    Raises UsageError with the line that is none of its rows.
    """
    try:
        if path.suffix == ".csv":
            records = read_csv_records(path, ROWS_BYTES)
            return [{name: value or None for name, value in record.items()} for _, record in records]
        return list(_json_lines(path))
    except UnreadableError as error:
        raise UsageError(f"{error}; correct the row: a table is a CSV or JSON Lines file") from error


def _json_lines(path: Path) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in read_lines(path, ROWS_BYTES):
        try:
            if line.strip():
                yield decoder.decode(line)
        except DECODING_ERRORS as error:
            raise UnreadableError(f"{path}:{number}: no row of a table: {decoding_problem(error)}") from error


def _check_columns(
    path: Path, columns: Mapping[str, None], names: Mapping[str, str], defaults: TableDefaults
) -> None:
    needed: list[tuple[str, ...]] = [
        ("duration",),
        *((each,) for each in ("prefill_tokens", "decode_tokens", "context_tokens")),
        ("num_decodes", "num_seqs"),
    ]
    missing = [
        " or ".join(name for quantity in options for name in COLUMNS[quantity])
        for options in needed
        if not any(quantity in names for quantity in options)
    ]
    has = visible_line(", ".join(columns))
    problems = (
        (not columns, "has no rows; it needs one row a step"),
        (
            "duration" not in names and _SCHEDULER_TIME in columns,
            (
                f"{_SCHEDULER_TIME} is the time of the scheduler and not of the step; add a column cycle_us, the "
                "start of the next step minus the start of this one"
            ),
        ),
        (bool(missing), f"columns are missing: {'; '.join(missing)}. Add them; the table has {has}"),
        *(
            (
                quantity not in names and getattr(defaults, quantity) is None,
                f"no column {quantity}; add it, or name the {quantity} with --{quantity}",
            )
            for quantity in ("model", "hardware")
        ),
    )
    if problem := next((problem for is_there, problem in problems if is_there), None):
        raise UsageError(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class _StepTable:
    """The rows of one run."""

    path: Path
    rows: Sequence[Row]
    names: Mapping[str, str]
    defaults: TableDefaults

    def observed(self, sha256: str) -> ObservedSteps:
        prefill, decode = self._column("prefill_tokens"), self._column("decode_tokens")
        num_prefills, num_decodes = self._rows(prefill, decode)
        duration_us = self._column("duration") / (NS_PER_US if self.names["duration"] == "dur_ns" else 1)
        is_out, left_out = first_reasons(self._reasons(prefill, num_prefills + num_decodes, duration_us))
        output = self._column("output_tokens", np.nan) if "output_tokens" in self.names else None
        model = self._word("model", self.defaults.model)
        return ObservedSteps(
            run=self._word("run", None) or self.path.stem,
            model=model,
            deployment=Deployment(
                shape=self._shape(model),
                hardware=hardware_for(self._word("hardware", self.defaults.hardware)),
                tensor_parallel=self._tensor_parallel(),
            ),
            work=count_step_work(
                num_prefills=num_prefills,
                prefill_tokens=prefill,
                num_decodes=num_decodes,
                decode_tokens=decode,
                context_after=self._column("context_tokens"),
                output_tokens=output,
            ),
            duration_us=duration_us,
            is_saturated=is_out,
            left_out=left_out,
            origin=Origin(path=str(self.path), sha256=sha256),
        )

    def _rows(self, prefill: Floats, decode: Floats) -> tuple[Floats, Floats]:
        """Prompts and decoding rows of each step; a decoding row has one token where only their sum is logged."""
        if "num_decodes" in self.names:
            num_decodes = self._column("num_decodes")
            if "num_prefills" in self.names:
                return self._column("num_prefills"), num_decodes
            return np.where(prefill > 0, 1.0, 0.0), num_decodes
        num_seqs = self._column("num_seqs")
        num_decodes = np.minimum(decode, np.where(prefill > 0, num_seqs - 1.0, num_seqs))
        return num_seqs - num_decodes, num_decodes

    def _reasons(self, prefill: Floats, num_seqs: Floats, duration_us: Floats) -> dict[str, Flags]:
        """The steps that each reason keeps from a fit."""
        is_from_start = self.names["duration"] == "cycle_us"
        neighbours = ("previous_prefill", "next_prefill") if is_from_start else ()
        near = np.max([prefill, *(self._column(key, 0.0) for key in neighbours)], axis=0)
        return {
            "warm-up": self._column("is_warmup", 0.0) > 0,
            "empty batch": num_seqs <= 0,
            "time not positive": ~(duration_us > 0),
            "preemption": self._column("preempted", 0.0) > 0,
            f"key-value memory above {CACHE_FULL_FRAC:.0%}": self._column("cache_frac", 0.0) > CACHE_FULL_FRAC,
            # Prompt tokens of a neighbouring step whose time is not noticed
            "long prompt next to a time from start to start": (near > 32) & is_from_start,
        }

    def _tensor_parallel(self) -> int:
        if "tensor_parallel" not in self.names:
            return self.defaults.tensor_parallel
        degrees = self._column("tensor_parallel")
        self._refuse_any(degrees < 1, self.names["tensor_parallel"], "it counts devices from 1")
        return int(degrees[0])

    def _word(self, quantity: str, default: str | None) -> str:
        return str(self.rows[0].get(self.names[quantity])) if quantity in self.names else default or ""

    def _column(self, quantity: str, unknown: float | None = None) -> Floats:
        """A column as numbers; a missing value is ``unknown``, or an error naming its row."""
        if quantity not in self.names:
            return np.full(len(self.rows), unknown)
        name = self.names[quantity]
        values = np.array([_number(row.get(name)) for row in self.rows])
        is_unknown = np.isnan(values)
        if unknown is None:
            self._refuse_any(is_unknown, name, "every step needs a number there")
        values[is_unknown] = unknown
        is_impossible = (values < 0) & (quantity != "duration") | (values > _MOST)
        self._refuse_any(is_impossible, name, "no step has such a value")
        return values

    def _refuse_any(self, is_wrong: Flags, name: str, problem: str) -> None:
        if is_wrong.any():
            index = int(is_wrong.argmax())
            value = visible_value(self.rows[index].get(name))
            raise UsageError(f"{self.path}: {name} is {value} in row {index + 1} of its run; {problem}")

    def _shape(self, model: str) -> ModelShape:
        """The shape of a model by its name; Hugging Face's suffix for converted weights is left out."""
        try:
            return shape_for(self.defaults.shapes.get(model, model.removesuffix("-hf")))
        except UsageError as error:
            remedy = f"--shape {visible_line(model, VALUE_CHARS)}=DIR names the directory of its config.json"
            raise UsageError(f"{self.path}: {error}; {remedy}") from error


def _number(value: Any) -> float:
    """A value as a number, yes as 1 and no as 0; NaN for anything else."""
    try:
        return _WORDS[value.lower()] if isinstance(value, str) and value.lower() in _WORDS else float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan
