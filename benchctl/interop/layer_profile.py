"""Measured layers of a model as CSV, in the layout of LLMServingSim's profiler.

A folder of one degree of tensor parallelism, ``tp<k>``, has three tables with times in microseconds:

dense.csv         layer,tokens,time_us
per_sequence.csv  layer,sequences,time_us
attention.csv     prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
moe.csv           tokens,activated_experts,time_us    (a model with experts: a whole block of them)

Newer profiles replace ``kv_prefill``, the tokens cached before a chunk, by ``prefill_key``, the mean number of
positions that its tokens attend to: ``kv_prefill`` + ``prefill_chunk`` / 2. They may have a column ``layer``, of
which the rows of "attention" are taken, and ``decode_q_len``, the query tokens of each decoding row: rows of 1 are
the grid of attention, and of more those without a prompt are what a verification of drafts takes.

``moe.csv`` may have a column ``ep``, the degree of expert parallelism; the rows of the run's ``ep_size`` or else of
the lowest degree are taken.

``skew.csv`` has batches of unequal contexts with their controls: n, pc, kvs, kv_big and kv_mean are rows, chunk,
shortest, longest and mean context; t_mean_us, t_max_us and t_skew_us the times of all rows at the mean, all at the
longest, and of the batch itself. It is used if its controls agree with the grid of attention; a table of other
columns is left alone.

Above it may lie the folder of a whole run, whose ``config.json`` states ``tp_size``, ``link_bw`` (GiB/s) and
``link_latency`` (ns) and tells which of several tables to take.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeGuard

from benchctl.errors import UsageError
from benchctl.steptime.layer_tables import AttentionCell, AttentionTable, Line, SkewedBatch, SkewTable, fits
from benchctl.steptime.layers import LayerTables, Link
from benchctl.units import GIB, NS_PER_US
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.files import UnreadableError, files_below, read_csv_records, read_json, require_files
from benchctl.untrusted.text import visible_value

DENSE: Final = "dense.csv"
PER_SEQUENCE: Final = "per_sequence.csv"
ATTENTION: Final = "attention.csv"
EXPERTS: Final = "moe.csv"
SKEW: Final = "skew.csv"
_SKEW_COLUMNS: Final = ("n", "pc", "kvs", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us")
CONFIG: Final = "config.json"
_MOST: Final = 1e15
"""Above every time in microseconds and every count of tokens."""


def read_layer_tables(directory: Path) -> LayerTables:
    """The tables in a folder ``tp<k>``, or the ones below the folder of a run.

    Raises UsageError when the folder, a table or a column is missing, or a value is not a number.
    """
    config = _config(directory)
    folder = find_tables(directory)
    require_files([folder / name for name in (DENSE, PER_SEQUENCE, ATTENTION, EXPERTS, SKEW)], within=folder)
    match = re.fullmatch(r"tp(\d+)", folder.name)
    degree = int(match.group(1)) if match else 1
    if not 0 < degree <= (1 << 16):
        raise UsageError(f"{folder}: {degree} devices cannot be; name the folder tp<k> after their number")
    cells = _attention_cells(folder / ATTENTION)
    with _named(folder / ATTENTION):
        attention = AttentionTable(cells.get(1.0, {}))
        verification = _verification(cells)
    return LayerTables(
        dense=_lines(folder / DENSE, "tokens"),
        per_sequence=_lines(folder / PER_SEQUENCE, "sequences"),
        attention=attention,
        experts=_experts(folder / EXPERTS, config.get("ep_size")),
        skew=_skew(folder / SKEW, attention),
        verification=verification,
        tensor_parallel=degree,
        link=_link(config, directory / CONFIG),
    )


def find_tables(directory: Path) -> Path:
    """The folder that ``read_layer_tables`` reads. Raises UsageError where there is not exactly one."""
    degree = _config(directory).get("tp_size")
    if (directory / DENSE).is_file():
        return directory
    folders = [path.parent for path in files_below(directory, DENSE)]
    if len(folders) > 1 and degree is not None:
        folders = [folder for folder in folders if folder.name == f"tp{degree}"]
    if len(folders) == 1:
        return folders[0]
    names = ", ".join(str(folder.relative_to(directory)) for folder in folders) or "none"
    raise UsageError(
        f"{directory}: tables of one layer profile expected ({DENSE}, {PER_SEQUENCE}, {ATTENTION}); folders with "
        f"{DENSE}: {names}. Name a folder tp<k> that has them"
    )


def _config(directory: Path) -> Mapping[str, Any]:
    """The settings of the first instance in ``config.json``, with the link of the whole; empty without the file."""
    path = directory / CONFIG
    require_files([path], within=directory)
    if not path.is_file():
        return {}
    try:
        document = read_json(path)
        instance = document["nodes"][0]["instances"][0]
        return {**{name: document.get(name) for name in ("link_bw", "link_latency")}, **instance}
    except UnreadableError as error:
        raise UsageError(f"{error}; LLMServingSim writes such a file") from error
    except (KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f"{path}: not the configuration of a run, {error!r}; it needs nodes with instances, as LLMServingSim "
            "writes them"
        ) from error


def _link(config: Mapping[str, Any], path: Path) -> Link | None:
    bandwidth, latency = (
        value[0] if isinstance(value := config.get(name), list) and value else value
        for name in ("link_bw", "link_latency")
    )
    if bandwidth is None or latency is None:
        return None
    if not (_is_number(bandwidth) and _is_number(latency) and bandwidth > 0):
        raise UsageError(
            f"{path}: link_bw is {visible_value(bandwidth)} and link_latency "
            f"{visible_value(latency)}; write a positive number of GiB/s and a number of ns"
        )
    return Link(latency_us=float(latency) / NS_PER_US, bandwidth_bytes_per_s=float(bandwidth) * GIB)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Puts the name of a table before what is wrong with its rows together."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _lines(path: Path, axis: str) -> dict[str, Line]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row, (x, time_us) in _rows(path, (axis, "time_us"), also=("layer",)):
        points.setdefault(row["layer"], []).append((x, time_us))
    with _named(path):
        return {layer: Line.through(of_layer) for layer, of_layer in points.items()}


def _experts(path: Path, degree: object) -> dict[float, Line]:
    """A line over the experts for each number of tokens; none without the file."""
    if not path.is_file():
        return {}
    rows = list(_rows(path, ("tokens", "activated_experts", "time_us")))
    degrees = sorted({int(row["ep"]) for row, _ in rows if re.fullmatch(r"[0-9]{1,5}", row.get("ep", ""))})
    if degrees:
        chosen = degree if degree in degrees else degrees[0]
        rows = [(row, point) for row, point in rows if row["ep"] == str(chosen)]
    points: dict[float, list[tuple[float, float]]] = {}
    for _, (tokens, experts, time_us) in rows:
        points.setdefault(tokens, []).append((experts, time_us))
    with _named(path):
        return {tokens: Line.through(of_tokens) for tokens, of_tokens in points.items()}


def _skew(path: Path, attention: AttentionTable) -> SkewTable | None:
    records = _records(path) if path.is_file() else []
    if not records or not set(_SKEW_COLUMNS) <= records[0][1].keys():
        return None
    batches = [  # a batch that could not be measured has empty times
        SkewedBatch(*_numbers(row, _SKEW_COLUMNS, f"{path}:{number}"))
        for number, row in records
        if all(row[name] for name in _SKEW_COLUMNS)
    ]
    return SkewTable(batches) if fits(batches, attention) else None


def _attention_cells(path: Path) -> dict[float, dict[AttentionCell, float]]:
    """Measured times of attention by the query tokens of each decoding row."""
    columns = {name for _, row in _records(path)[:1] for name in row}
    reach = "prefill_key" if "prefill_key" in columns else "kv_prefill"
    cells: dict[float, dict[AttentionCell, float]] = {}
    for row, numbers in _rows(path, ("prefill_chunk", reach, "n_decode", "kv_decode", "time_us")):
        if row.get("layer", "attention") != "attention":
            continue
        chunk, history, rows, context, time_us = numbers
        if reach == "prefill_key":
            history -= chunk / 2
        cell = AttentionCell(chunk, history if chunk else 0.0, rows, context if rows else 0.0)
        (query_tokens,) = (
            _numbers(row, ("decode_q_len",), str(path)) if rows and row.get("decode_q_len") else (1.0,)
        )
        cells.setdefault(query_tokens, {})[cell] = time_us
    return cells


def _verification(cells: Mapping[float, Mapping[AttentionCell, float]]) -> dict[float, AttentionTable] | None:
    """Decoding rows alone by their query tokens; None where none has several."""
    rows_alone = {
        query_tokens: {cell: time_us for cell, time_us in of_tokens.items() if not cell.chunk}
        for query_tokens, of_tokens in cells.items()
    }
    tables = {query_tokens: AttentionTable(alone) for query_tokens, alone in rows_alone.items() if alone}
    return tables if max(tables, default=1.0) > 1 else None


def _rows(
    path: Path, numeric: tuple[str, ...], *, also: tuple[str, ...] = ()
) -> list[tuple[Mapping[str, str], tuple[float, ...]]]:
    """Each row with the numbers in its numeric columns."""
    records = _records(path)
    columns = list(records[0][1]) if records else []
    missing = [name for name in (*also, *numeric) if name not in columns]
    if missing:
        raise UsageError(
            f"{path}: column {missing[0]} is missing; its columns are {','.join(columns) or 'none'}, needed are "
            f"{','.join((*also, *numeric))}"
        )
    return [(row, _numbers(row, numeric, f"{path}:{number}")) for number, row in records]


def _records(path: Path) -> list[tuple[int, dict[str, str]]]:
    try:
        return list(read_csv_records(path, ROWS_BYTES))
    except UnreadableError as error:
        raise UsageError(f"{error}; correct it, or copy the profile again: it needs this table") from error


def _numbers(row: Mapping[str, str], names: Sequence[str], where: str) -> tuple[float, ...]:
    """Times and counts of a row. Raises UsageError that names ``where`` for what is neither."""
    numbers = []
    for name in names:
        try:
            number = float(row[name])
        except ValueError:
            number = math.nan
        if not 0 <= number <= _MOST:
            value = visible_value(row[name])
            raise UsageError(f"{where}: {name} is {value}; columns {', '.join(names)} hold numbers from 0")
        numbers.append(number)
    return tuple(numbers)
