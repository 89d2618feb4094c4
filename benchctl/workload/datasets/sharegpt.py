"""ShareGPT: conversations as a JSON list of ``{"id", "conversations": [{"from", "value"}]}``.

The first turn is the prompt, the second gives the length of the output. Rows are kept by the rules of
``vllm bench serve``: at least two turns, prompt and output of at least 4 tokens each, a prompt of at most 1,024
and both together at most 2,048; beyond these, the first two turns must be those of a human and of the model.
Lengths are those of ``count_tokens``, so the rows kept can differ from those kept with a model's tokenizer.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from benchctl.errors import DatasetError
from benchctl.workload.datasets.dataset import FileDataset
from benchctl.workload.datasets.files import DatasetFile
from benchctl.workload.datasets.prompt import Prompt, Selection, SourceFile
from benchctl.workload.datasets.rows import read_bytes
from benchctl.workload.datasets.tokens import count_tokens
from benchctl.workload.tokenizers.tokenizer import Tokenizer

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    speaker: str = msgspec.field(name="from")
    value: str


class Conversation(msgspec.Struct, frozen=True):
    """One element of the list; its id is not needed."""

    conversations: tuple[Turn, ...] = ()


def sharegpt_prompts(
    file: SourceFile,
    selection: Selection,
    tokenizer: Tokenizer,  # noqa: ARG001
) -> tuple[Prompt, ...]:
    """The selected usable conversations. Lengths are counted only until enough are selected."""
    content = read_bytes(file.path)
    try:
        rows = msgspec.json.decode(content, type=list[Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{file.path}: {error}. Expected a JSON list of objects with 'conversations' of 'from' and 'value': "
            "fetch the file again with 'benchctl data fetch sharegpt', or correct workload.path"
        ) from error
    return selection.take(_usable(rows, selection.row_order(len(rows)), file.dataset), file)


def _usable(rows: Sequence[Conversation], order: Sequence[int], dataset: str) -> Iterator[Prompt]:
    for i in order:
        turns = rows[i].conversations[:2]
        if [turn.speaker for turn in turns] != ["human", "gpt"]:
            continue
        prompt_tokens, output_tokens = (count_tokens(turn.value) for turn in turns)
        if is_usable(prompt_tokens, output_tokens):
            yield Prompt(
                prompt_id=f"sharegpt-{i:05d}",
                source=f"{dataset}:{i}",
                text=turns[0].value,
                prompt_tokens=prompt_tokens,
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
