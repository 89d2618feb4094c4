"""Prompts of a dataset, and the selection of its rows.

Each dataset module turns rows into prompts; ``prepare`` turns prompts into requests.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Literal

from benchctl.errors import DatasetError
from benchctl.records.record import Message
from benchctl.workload.seeded import named_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt with everything that its dataset records.

    Exactly one of ``messages``, ``text`` and ``token_numbers`` is set.
    """

    prompt_id: str
    """Stable over selections and sizes, for example ``gsm8k-00017``."""
    source: str
    """Dataset and row, for example ``gsm8k/test:17``; rows count from 0."""
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    text_tokens: int | None = None
    """Tokens of ``text`` by the tokenizer of the request set, where the dataset had to count them."""
    token_numbers: tuple[int, ...] | None = None
    """A number for each token of a text that is to be written; equal numbers stand for equal tokens."""
    output_tokens: int | None = None
    """Output length that the dataset recorded."""
    answer: str | None = None
    arrival_ns: int | None = None
    """Recorded arrival, from the beginning of the dataset."""
    session: str | None = None
    """Conversation of which the prompt is a turn, as the dataset names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A dataset file on this machine; ``dataset`` is its true source, without a path."""

    path: Path
    kind: str
    """Dataset as profiles name it, for example ``gsm8k``."""
    dataset: str
    more_paths: tuple[Path, ...] = ()
    """Files with the rows behind those of ``path``."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of the file for each field of a custom row that is not called as the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selection of rows: the first in file order, or a seeded sample.

    Law: more prompts extend the same selection.
    """

    num_prompts: int
    method: Literal["first", "sample"]
    seed: int
    repeats: bool = False
    """Begin again where there are fewer rows."""

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
        if self.repeats and selected:
            return tuple(islice(_laps(selected), self.num_prompts))
        fewer = (
            f"set workload.num_prompts to at most {len(selected)}, begin again with workload.repeat, or take "
            "several samples of each prompt with workload.samples_per_prompt"
        )
        raise DatasetError(
            f"{file.path}: {self.num_prompts} prompts are asked for, but {file.kind} has only {len(selected)} "
            f"usable rows; {fewer if selected else 'correct its rows, or name another file'}"
        )


def lap_ns(first_ns: int, last_ns: int, num_arrivals: int) -> int:
    """Time after which a recording begins again: its length and one mean gap."""
    return last_ns - first_ns + (last_ns - first_ns) // max(num_arrivals - 1, 1)


def _laps(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """The prompts again and again; those of later laps have names of their own and later arrivals."""
    yield from prompts
    arrivals = [prompt.arrival_ns for prompt in prompts if prompt.arrival_ns is not None]
    period_ns = lap_ns(min(arrivals), max(arrivals), len(arrivals)) if arrivals else 0
    for lap in count(1):
        for prompt in prompts:
            arrival_ns = None if prompt.arrival_ns is None else prompt.arrival_ns + lap * period_ns
            yield replace(prompt, prompt_id=f"{prompt.prompt_id}-lap{lap:02d}", arrival_ns=arrival_ns)
