"""Datasets: each is read from a published file or one of the user's own, or made from the seed of the profile.

A dataset is one module of ``published/``, ``own/`` or ``made/`` with a ``DATASET``, and one line in
``benchctl/profile/choices.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TypeAlias

from benchctl.errors import DatasetError
from benchctl.profile.choices import DATASETS
from benchctl.profile.model import Workload
from benchctl.workload.datasets.files import DatasetFile
from benchctl.workload.datasets.prompt import Prompt, Selection, SourceFile
from benchctl.workload.datasets.recorded_load import RecordedLoad
from benchctl.workload.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDataset:
    """A published file, and the reader of its prompts."""

    file: DatasetFile
    read: Callable[[SourceFile, Selection, Tokenizer], tuple[Prompt, ...]]
    """Takes the tokenizer for rules on lengths; prompts need no count here."""
    has_output_lengths: bool = False
    """Whether each prompt has the length of its output."""
    has_arrivals: bool = False
    """Whether each prompt has a recorded arrival, as ``arrival.kind: trace`` needs."""
    read_lengths: Callable[[SourceFile], RecordedLoad] | None = None
    """Reads arrivals and lengths alone, for loads that are too large for prompts."""
    is_replaceable: bool = False
    """Whether generated prompts may replace a missing file; a recorded trace has no equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDataset:
    """Rows of the user's own, which ``workload.path`` names; they may have arrivals and lengths of outputs."""

    find: Callable[[Workload], SourceFile]
    read: Callable[[SourceFile, Selection, Tokenizer], tuple[Prompt, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDataset:
    """Prompts made from a seed, without a file."""

    make: Callable[[Workload, int], tuple[Prompt, ...]]
    """Takes the workload, for its ``num_prompts`` and lengths, and the seed of the profile."""
    needs_input_len: bool = False
    """Whether ``workload.input_len`` must be set; for all other datasets it must not."""


Dataset: TypeAlias = FileDataset | OwnDataset | MadeDataset


def dataset_named(name: str) -> Dataset:
    """The dataset of a name in ``DATASETS``."""
    dataset: Dataset = import_module(DATASETS[name]).DATASET
    return dataset


def names_of_datasets(accepts: Callable[[Dataset], bool]) -> tuple[str, ...]:
    """Names of the datasets that ``accepts`` holds for, in the order of ``DATASETS``."""
    return tuple(name for name in DATASETS if accepts(dataset_named(name)))


def meanings_of_datasets() -> dict[str, str]:
    """One sentence on the prompts of each dataset, by name: the first of its module."""
    texts = {name: import_module(module).__doc__ or "" for name, module in DATASETS.items()}
    return {name: " ".join(text.partition("\n\n")[0].replace("``", "").split()) for name, text in texts.items()}


@cache
def dataset_files() -> dict[str, DatasetFile]:
    """The published file of each dataset that has one, by name."""
    datasets = {name: dataset_named(name) for name in DATASETS}
    return {name: dataset.file for name, dataset in datasets.items() if isinstance(dataset, FileDataset)}


def dataset_file(name: str) -> DatasetFile:
    """The published file of a dataset. Raises DatasetError for a name without one."""
    files = dataset_files()
    if name not in files:
        raise DatasetError(f"{name!r} is not a dataset with a file; choose one of {', '.join(files)}")
    return files[name]
