"""Prompts of one's own, as JSON Lines: ``prompt`` or ``messages`` in each row, and what else is known of it.

| field | meaning |
|---|---|
| ``prompt`` | the prompt as plain text |
| ``messages`` | the prompt as a chat: a list of ``{"role", "content"}`` |
| ``input_len`` | in place of both: length of a prompt that is written; ``hash_ids``: blocks that it shares |
| ``output_len`` | tokens of the output with stop mode ``forced`` |
| ``gold`` | the right answer |
| ``timestamp`` | arrival in milliseconds, for ``arrival.kind: trace`` |
| ``session`` | name of the conversation that the prompt is a turn of; recorded only |
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from benchctl.errors import DatasetError, ProfileError
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Workload
from benchctl.records.record import Message
from benchctl.units import NS_PER_MS
from benchctl.untrusted.reading import DECODING_ERRORS, decoding_problem
from benchctl.workload.datasets.base import (
    Length,
    OwnDataset,
    Prompt,
    Selection,
    SourceFile,
    TimestampMs,
    own_file,
    read_jsonl_rows,
)
from benchctl.workload.datasets.blocks import numbers_of_blocks
from benchctl.workload.tokenizers import Tokenizer

_FORMS: Final = ("prompt", "messages", "input_len")
REMEDY: Final = (
    "a row is a JSON object with prompt (text) or messages (a list of role and content); "
    "workload.columns names other columns"
)


class CustomRow(msgspec.Struct, frozen=True):
    """One row; exactly one of ``prompt``, ``messages`` and ``input_len`` is there."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    input_len: Length | None = None
    output_len: Length | None = None
    gold: str | int | float | None = None
    timestamp: TimestampMs | None = None
    session: str | int | None = None
    hash_ids: tuple[int, ...] | None = None


def custom_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected rows. Arrivals count from the first of the file, whichever rows are taken."""
    rows = read_jsonl_rows(file.path, dict[str, Any], REMEDY)
    located = ((f"{file.path}:{number}", fields) for number, fields in rows)
    return prompts_of_rows(located, file, selection)


def prompts_of_rows(
    located: Iterable[tuple[str, dict[str, Any]]], file: SourceFile, selection: Selection
) -> tuple[Prompt, ...]:
    """Prompts of the selected rows, each given with its location. Raises DatasetError at the first wrong row."""
    rows = [_checked_row(where, fields, file.columns) for where, fields in located]
    if not rows:
        raise DatasetError(f"{file.path} has no rows; {REMEDY}")
    first_ms = min((row.timestamp for row in rows if row.timestamp is not None), default=0.0)
    prompts = (
        Prompt(
            prompt_id=f"{file.kind}-{i:05d}",
            source=f"{file.dataset}:{i}",
            messages=row.messages,
            text=row.prompt,
            token_numbers=_numbers(row, i, selection.seed),
            output_tokens=row.output_len,
            answer=None if row.gold is None else str(row.gold),
            arrival_ns=None if row.timestamp is None else round((row.timestamp - first_ms) * NS_PER_MS),
            session=None if row.session is None else str(row.session),
        )
        for i, row in ((i, rows[i]) for i in selection.row_order(len(rows)))
    )
    return selection.take(prompts, file)


def _checked_row(where: str, fields: dict[str, Any], columns: Mapping[str, str]) -> CustomRow:
    try:
        row = msgspec.convert(_named(fields, columns), CustomRow)
        _check(row, fields)
    except DECODING_ERRORS as error:
        raise DatasetError(f"{where}: {decoding_problem(error)}; {REMEDY}") from error
    return row


def _named(fields: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Values by the fields of ``CustomRow``; a column that is another field is not read under its own name."""
    if unknown := set(columns) - set(CustomRow.__struct_fields__):
        names = ", ".join(CustomRow.__struct_fields__)
        raise ValueError(f"workload.columns maps {', '.join(sorted(unknown))}; fields are {names}")
    for field, column in columns.items():
        if column not in fields:
            raise ValueError(f"column {column}, which is {field}, is not among {', '.join(fields) or '(none)'}")
    own = {name: value for name, value in fields.items() if name not in columns.values()}
    return own | {field: fields[column] for field, column in columns.items()}


def _check(row: CustomRow, fields: dict[str, Any]) -> None:
    """Raise ValueError for a row without a prompt, with several, or with values that cannot be."""
    given = [name for name in _FORMS if getattr(row, name) is not None]
    if not given:
        unknown = [name for name in fields if name not in CustomRow.__struct_fields__]
        near = next((hint for name in unknown if (hint := did_you_mean(name, _FORMS))), None)
        raise ValueError(f"no prompt among its fields {', '.join(fields) or '(none)'}{f'; {near}' if near else ''}")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} in one row; keep one of them")
    if row.prompt == "" or row.messages == ():
        raise ValueError(f"{given[0]} is empty")
    if row.hash_ids is not None and row.input_len is None:
        raise ValueError("hash_ids describe a prompt that is written; give input_len in place of its text")
    for name in ("input_len", "output_len"):
        length = getattr(row, name)
        if length is not None and length < 1:
            raise ValueError(f"{name} is {length}; it must be at least 1")
    if row.input_len is not None:
        _numbers(row, 0, 0)


def _numbers(row: CustomRow, index: int, seed: int) -> tuple[int, ...] | None:
    if row.input_len is None:
        return None
    return numbers_of_blocks(row.hash_ids or (), row.input_len, index, seed)


def _find(workload: Workload) -> SourceFile:
    if workload.path is None:
        raise ProfileError(f"workload.path is missing with dataset custom; name a JSON Lines file in it: {REMEDY}")
    return replace(own_file("custom", workload.path), columns=workload.columns)


DATASET: Final = OwnDataset(find=_find, read=custom_prompts)
