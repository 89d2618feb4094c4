"""Mooncake's traces: arrivals, lengths and shared prefixes of real traffic, as JSON Lines.

Rows hold ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``, one for
each block of 512 tokens begun: a prompt that has the ids of another has its tokens. The traces hold no text;
prompts are written so that they share what their ids share. Source of the format: the traces released with the
paper at FAST'25.
"""

from array import array
from typing import Final

import msgspec

from benchctl.units import NS_PER_MS
from benchctl.workload.datasets.base import (
    DatasetFile,
    FileDataset,
    Length,
    Prompt,
    RecordedLoad,
    Selection,
    SourceFile,
    TimestampMs,
    damaged_row,
    read_jsonl_rows,
)
from benchctl.workload.datasets.blocks import numbers_of_blocks
from benchctl.workload.tokenizers import Tokenizer


class MooncakeRow(msgspec.Struct, frozen=True):
    """One recorded request."""

    timestamp: TimestampMs
    input_length: Length
    output_length: Length
    hash_ids: tuple[int, ...] = ()


def mooncake_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected requests. Arrivals count from the first of the trace, whichever rows are taken."""
    rows = _checked_rows(file)
    first_ms = min((row.timestamp for _, row in rows), default=0.0)

    def prompt(i: int) -> Prompt:
        number, row = rows[i]
        try:
            numbers = numbers_of_blocks(row.hash_ids, row.input_length, i, selection.seed)
        except ValueError as error:
            raise damaged_row(file.path, number, str(error)) from error
        return Prompt(
            prompt_id=f"mooncake-{i:05d}",
            source=f"{file.dataset}:{i}",
            token_numbers=numbers,
            output_tokens=row.output_length,
            arrival_ns=round((row.timestamp - first_ms) * NS_PER_MS),
        )

    return selection.take(map(prompt, selection.row_order(len(rows))), file)


def mooncake_lengths(file: SourceFile) -> RecordedLoad:
    """Arrivals from the first request, and lengths, of all requests."""
    rows = sorted((row for _, row in _checked_rows(file)), key=lambda row: row.timestamp)
    return RecordedLoad(
        arrival_ns=array("q", (round((row.timestamp - rows[0].timestamp) * NS_PER_MS) for row in rows)),
        prompt_tokens=array("q", (row.input_length for row in rows)),
        output_tokens=array("q", (row.output_length for row in rows)),
    )


def _checked_rows(file: SourceFile) -> list[tuple[int, MooncakeRow]]:
    rows = read_jsonl_rows(file.path, MooncakeRow)
    for number, row in rows:
        if min(row.input_length, row.output_length) < 1:
            lengths = f"{row.input_length} and {row.output_length}"
            raise damaged_row(file.path, number, f"lengths are {lengths} tokens; each must be at least 1")
        if row.timestamp < 0:
            raise damaged_row(file.path, number, f"timestamp is {row.timestamp:g}, before the trace begins")
    return rows


DATASET: Final = FileDataset(
    file=DatasetFile(
        name="mooncake",
        label="mooncake/fast25-conversation",
        folder="mooncake",
        filename="conversation_trace.jsonl",
        url="https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
        "3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces/conversation_trace.jsonl",
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        size_bytes=3_029_533,
        licence="Apache-2.0",
        source_page="https://github.com/kvcache-ai/Mooncake",
    ),
    read=mooncake_prompts,
    read_lengths=mooncake_lengths,
    has_output_lengths=True,
    has_arrivals=True,
)
