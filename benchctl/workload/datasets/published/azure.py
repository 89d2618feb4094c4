"""Azure LLM inference trace: arrivals and lengths of real traffic, as CSV TIMESTAMP,ContextTokens,GeneratedTokens.

Timestamps carry seven decimals (100 ns), one more than ``datetime`` has, so the fraction is parsed separately.
The trace holds no text; prompts are synthetic words of the recorded length.
"""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from benchctl.errors import DatasetError
from benchctl.units import NS_PER_S
from benchctl.untrusted import PROMPT_TOKENS, ROWS_BYTES
from benchctl.untrusted.reading import UnreadableError, decoding_problem, read_csv
from benchctl.untrusted.text import visible_value
from benchctl.workload.datasets.base import (
    DatasetFile,
    FileDataset,
    Prompt,
    RecordedLoad,
    Selection,
    SourceFile,
    damaged_row,
    unreadable,
)
from benchctl.workload.datasets.made.synthetic import numbers_of_prompt
from benchctl.workload.tokenizers import Tokenizer

_LAST_NS: Final = 1 << 62
HEADER: Final = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class _Row:
    arrival_ns: int
    context_tokens: int
    generated_tokens: int


def azure_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected rows. Arrivals count from the first row of the file, whichever rows are taken."""
    rows = _read(file)
    prompts = (
        Prompt(
            prompt_id=f"azure-trace-{i:05d}",
            source=f"{file.dataset}:{i}",
            token_numbers=numbers_of_prompt(rows[i].context_tokens, i, selection.seed),
            output_tokens=rows[i].generated_tokens,
            arrival_ns=rows[i].arrival_ns - rows[0].arrival_ns,
        )
        for i in selection.row_order(len(rows))
    )
    return selection.take(prompts, file)


def azure_lengths(file: SourceFile) -> RecordedLoad:
    """Arrivals from the first row, and lengths, of all rows."""
    rows = _read(file)
    return RecordedLoad(
        arrival_ns=array("q", (row.arrival_ns - rows[0].arrival_ns for row in rows)),
        prompt_tokens=array("q", (row.context_tokens for row in rows)),
        output_tokens=array("q", (row.generated_tokens for row in rows)),
    )


def timestamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of ``2023-11-16 18:15:46.6805900``, exactly. Raises ValueError for anything else."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise ValueError(f"timestamp {text!r} is not of the form 2023-11-16 18:15:46.6805900")
    moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return int(moment.timestamp()) * NS_PER_S + int((match[2] or "").ljust(9, "0"))


def _read(file: SourceFile) -> list[_Row]:
    try:
        return _parsed(file, read_csv(file.path, ROWS_BYTES))
    except UnreadableError as error:
        raise unreadable(error) from error


def _parsed(file: SourceFile, lines: Iterator[tuple[int, list[str]]]) -> list[_Row]:
    _, header = next(lines, (1, []))
    if header != HEADER:
        raise DatasetError(
            f"{file.path}:1: the header is {visible_value(','.join(header))}, not {','.join(HEADER)!r}; correct "
            "workload.path, or fetch the trace with 'benchctl data fetch azure-trace'"
        )
    rows: list[_Row] = []
    for number, fields in lines:
        try:
            rows.append(_parse(fields, not_before_ns=rows[-1].arrival_ns if rows else 0))
        except ValueError as error:
            raise damaged_row(file.path, number, decoding_problem(error)) from error
    return rows


def _parse(fields: list[str], *, not_before_ns: int) -> _Row:
    row = _Row(timestamp_ns(fields[0]), int(fields[1]), int(fields[2]))
    if min(row.context_tokens, row.generated_tokens) < 1:
        raise ValueError(f"lengths are {fields[1]} and {fields[2]} tokens; each must be at least 1")
    if max(row.context_tokens, row.generated_tokens) > PROMPT_TOKENS:
        raise ValueError(f"lengths are {fields[1]} and {fields[2]} tokens; each must be at most {PROMPT_TOKENS}")
    if row.arrival_ns > _LAST_NS:
        raise ValueError(f"timestamp {fields[0]!r} is not of this century")
    if row.arrival_ns < not_before_ns:
        raise ValueError(f"timestamp {fields[0]!r} is before that of the previous row")
    return row


DATASET: Final = FileDataset(
    file=DatasetFile(
        name="azure-trace",
        label="azure-trace/conv-2023",
        folder="azure",
        filename="AzureLLMInferenceTrace_conv.csv",
        url="https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
        "b469a113cedca53ddc3bdea71a143dc4b7d8700c/data/AzureLLMInferenceTrace_conv.csv",
        sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        size_bytes=719_188,
        licence="CC-BY-4.0",
        source_page="https://github.com/Azure/AzurePublicDataset",
    ),
    read=azure_prompts,
    read_lengths=azure_lengths,
    has_output_lengths=True,
    has_arrivals=True,
)
