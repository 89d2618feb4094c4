"""ShareGPT replay: recorded lengths, token ids and arrivals, in the JSON Lines format of LLMServingSim.

Rows hold ``input_toks``, ``output_toks``, ``arrival_time_ns`` and usually ``input_tok_ids``. The text cannot
be restored without the tokenizer, so each id becomes a word of its own: prompts that shared a prefix still do.
"""

from array import array
from typing import Final

import msgspec

from benchctl.workload.datasets.base import (
    ArrivalNs,
    DatasetFile,
    FileDataset,
    Length,
    Prompt,
    RecordedLoad,
    Selection,
    SourceFile,
    damaged_row,
    read_jsonl_rows,
)
from benchctl.workload.datasets.made.synthetic import numbers_of_prompt
from benchctl.workload.tokenizers import Tokenizer


class ReplayRow(msgspec.Struct, frozen=True):
    """One recorded request."""

    input_toks: Length
    output_toks: Length
    arrival_time_ns: ArrivalNs
    input_tok_ids: tuple[int, ...] | None = None


def replay_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected requests. Arrivals count from the beginning of the recording, whichever rows are taken."""
    rows = _checked_rows(file)
    prompts = (
        Prompt(
            prompt_id=f"sharegpt-replay-{i:05d}",
            source=f"{file.dataset}:{i}",
            token_numbers=rows[i].input_tok_ids or numbers_of_prompt(rows[i].input_toks, i, selection.seed),
            output_tokens=rows[i].output_toks,
            arrival_ns=rows[i].arrival_time_ns,
        )
        for i in selection.row_order(len(rows))
    )
    return selection.take(prompts, file)


def replay_lengths(file: SourceFile) -> RecordedLoad:
    """Arrivals from the beginning of the recording, and lengths, of all requests."""
    rows = sorted(_checked_rows(file), key=lambda row: row.arrival_time_ns)
    return RecordedLoad(
        arrival_ns=array("q", (row.arrival_time_ns for row in rows)),
        prompt_tokens=array("q", (row.input_toks for row in rows)),
        output_tokens=array("q", (row.output_toks for row in rows)),
    )


def _checked_rows(file: SourceFile) -> list[ReplayRow]:
    rows: list[ReplayRow] = []
    for number, row in read_jsonl_rows(file.path, ReplayRow):
        problem = _problem(row)
        if problem is not None:
            raise damaged_row(file.path, number, problem)
        rows.append(row)
    return rows


def _problem(row: ReplayRow) -> str | None:
    if row.input_toks < 1 or row.output_toks < 1:
        return f"lengths are {row.input_toks} and {row.output_toks} tokens; each must be at least 1"
    if row.arrival_time_ns < 0:
        return f"arrival_time_ns is {row.arrival_time_ns}, before the beginning of the recording"
    if row.input_tok_ids is not None and len(row.input_tok_ids) != row.input_toks:
        return f"input_toks is {row.input_toks}, but there are {len(row.input_tok_ids)} input_tok_ids"
    return None


DATASET: Final = FileDataset(
    file=DatasetFile(
        name="sharegpt-replay",
        label="sharegpt-replay/llama-3.1-8b-300-sps10",
        folder="sharegpt",
        filename="sharegpt-llama-3.1-8b-300-sps10.jsonl",
        url="https://raw.githubusercontent.com/casys-kaist/LLMServingSim/"
        "5daddb21a545658d5150b535712d0494584b5278/workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl",
        sha256="05e48b32da530d4a3dd77f3d47c6fe694ac8308d611aa088e38bb10fba2b3b3a",
        size_bytes=2_574_379,
        licence="MIT",
        source_page="https://github.com/casys-kaist/LLMServingSim",
    ),
    read=replay_prompts,
    read_lengths=replay_lengths,
    has_output_lengths=True,
    has_arrivals=True,
)
