"""Prompts of a dataset, and the selection of its rows.

Each dataset module turns rows into prompts; ``prepare`` turns prompts into requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchctl.errors import DatasetError
from benchctl.records.request import Message
from benchctl.workload.seeded import named_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt with everything that its dataset records. Exactly one of ``messages`` and ``text`` is set."""

    prompt_id: str
    """Stable over selections and sizes, for example ``gsm8k-00017``."""
    source: str
    """Dataset and row, for example ``gsm8k/test:17``; rows count from 0."""
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    prompt_tokens: int
    output_tokens: int | None = None
    """Output length that the dataset recorded."""
    answer: str | None = None
    arrival_ns: int | None = None
    """Recorded arrival, from the beginning of the dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A dataset file on this machine; ``dataset`` is its true source, without a path."""

    path: Path
    kind: str
    """Dataset as profiles name it, for example ``gsm8k``."""
    dataset: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selection of rows: the first in file order, or a seeded sample.

    Law: more prompts extend the same selection.
    """

    num_prompts: int
    method: Literal["first", "sample"]
    seed: int

    def row_order(self, num_rows: int) -> Sequence[int]:
        """Rows in the order in which they are considered."""
        if self.method == "first":
            return range(num_rows)
        order = list(range(num_rows))
        named_stream(self.seed, "selection").shuffle(order)
        return order

    def take(self, prompts: Iterable[Prompt], file: SourceFile) -> tuple[Prompt, ...]:
        """The first ``num_prompts`` of ``prompts``, which are drawn only as far as needed.

        Raises DatasetError when there are fewer.
        """
        selected: list[Prompt] = []
        for prompt in prompts:
            selected.append(prompt)
            if len(selected) == self.num_prompts:
                return tuple(selected)
        raise DatasetError(
            f"{file.path}: {self.num_prompts} prompts are asked for, but {file.kind} has only {len(selected)} "
            f"usable rows; set workload.num_prompts to at most {len(selected)}, or take several samples of each "
            "prompt with workload.samples_per_prompt"
        )
