"""ShareGPT: conversations as a JSON list of ``{"id", "conversations": [{"from", "value"}]}``.

The first turn is the prompt, the second gives the length of the output. Rows are kept by the rules of
``vllm bench serve``: at least two turns, prompt and output of at least 4 tokens each, a prompt of at most 1,024
and both together at most 2,048; beyond these, the first two turns must be those of a human and of the model.
Lengths are those of the tokenizer of the request set; an estimate can keep other rows than the model's tokenizer.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from benchctl.errors import DatasetError
from benchctl.untrusted.reading import DECODING_ERRORS, decoding_problem
from benchctl.workload.datasets.base import DatasetFile, FileDataset, Prompt, Selection, SourceFile, read_file
from benchctl.workload.tokenizers import Tokenizer

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
_COUNTED_TOGETHER: Final = 64
"""Conversations whose lengths are counted in one call."""


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    speaker: str = msgspec.field(name="from")
    value: str


class Conversation(msgspec.Struct, frozen=True):
    """One element of the list; its id is not needed."""

    conversations: tuple[Turn, ...] = ()


def sharegpt_prompts(file: SourceFile, selection: Selection, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected usable conversations. Lengths are counted only until enough are selected."""
    content = read_file(file.path)
    try:
        rows = msgspec.json.decode(content, type=list[Conversation])
    except DECODING_ERRORS as error:
        raise DatasetError(
            f"{file.path}: {decoding_problem(error)}. Expected a JSON list of objects with 'conversations' of "
            "'from' and 'value': fetch the file again with 'benchctl data fetch sharegpt', or correct workload.path"
        ) from error
    answered = ((i, *_prompt_and_answer(rows[i])) for i in selection.row_order(len(rows)) if _is_answered(rows[i]))
    return selection.take(_usable(answered, file.dataset, tokenizer), file)


def _is_answered(row: Conversation) -> bool:
    return [turn.speaker for turn in row.conversations[:2]] == ["human", "gpt"]


def _prompt_and_answer(row: Conversation) -> tuple[str, str]:
    return row.conversations[0].value, row.conversations[1].value


def _usable(rows: Iterable[tuple[int, str, str]], dataset: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Prompts of the rows whose lengths are within the rules, counted batch by batch."""
    remaining = iter(rows)
    while batch := list(islice(remaining, _COUNTED_TOGETHER)):
        counts = iter(tokenizer.count_texts([text for _, *texts in batch for text in texts]))
        for i, prompt, _ in batch:
            prompt_tokens, output_tokens = next(counts), next(counts)
            if is_usable(prompt_tokens, output_tokens):
                yield Prompt(
                    prompt_id=f"sharegpt-{i:05d}",
                    source=f"{dataset}:{i}",
                    text=prompt,
                    text_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                )


def is_usable(prompt_tokens: int, output_tokens: int) -> bool:
    """True if the lengths of a conversation are within the rules of the module's docstring."""
    return (
        min(prompt_tokens, output_tokens) >= MIN_TOKENS
        and prompt_tokens <= MAX_PROMPT_TOKENS
        and prompt_tokens + output_tokens <= MAX_TOTAL_TOKENS
    )


DATASET: Final = FileDataset(
    file=DatasetFile(
        name="sharegpt",
        label="sharegpt/v3-unfiltered-cleaned",
        folder="sharegpt",
        filename="ShareGPT_V3_unfiltered_cleaned_split.json",
        url="https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/"
        "192ab2185289094fc556ec8ce5ce1e8e587154ca/ShareGPT_V3_unfiltered_cleaned_split.json",
        sha256="35f0e213ce091ed9b9af2a1f0755e9d39f9ccec34ab281cd4ca60d70f6479ba4",
        size_bytes=672_837_942,
        licence="Apache-2.0",
        source_page="https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered",
    ),
    read=sharegpt_prompts,
    has_output_lengths=True,
    is_replaceable=True,
)
