"""Keys of a workload that its dataset would leave unread: their author expects an effect, so they are refused."""

from typing import Final

from benchctl.errors import ProfileError
from benchctl.profile.model import Workload
from benchctl.workload.datasets.dataset import Dataset, MadeDataset, OwnDataset, names_of_datasets

_HUB: Final = "huggingface"


def refuse_unread_keys(workload: Workload, dataset: Dataset) -> None:
    """Raise ProfileError for a key that the dataset does not read."""
    _refuse_lengths(workload, dataset)
    if workload.path is not None and isinstance(dataset, MadeDataset):
        names = names_of_datasets(lambda other: not isinstance(other, MadeDataset))
        raise ProfileError(
            f"workload.path is {workload.path}, but dataset {workload.dataset} reads no file; leave it out, or "
            f"choose one of {', '.join(names)}"
        )
    if workload.columns and not isinstance(dataset, OwnDataset):
        names = names_of_datasets(lambda other: isinstance(other, OwnDataset))
        raise ProfileError(
            f"workload.columns is {workload.columns}, but rows of {workload.dataset} have a format of their own; "
            f"leave it out, or choose one of {', '.join(names)}"
        )
    for key in ("revision", "split"):
        if (value := getattr(workload, key)) is not None and workload.dataset != _HUB:
            raise ProfileError(
                f"workload.{key} is {value} with dataset {workload.dataset}, which has none; leave it out, or "
                f"choose dataset {_HUB}"
            )


def _refuse_lengths(workload: Workload, dataset: Dataset) -> None:
    needs_input_len = isinstance(dataset, MadeDataset) and dataset.needs_input_len
    if workload.input_len is not None and not needs_input_len:
        names = names_of_datasets(lambda other: isinstance(other, MadeDataset) and other.needs_input_len)
        raise ProfileError(
            f"workload.input_len is {workload.input_len} with dataset {workload.dataset}, whose prompts have their "
            f"own lengths; set it to null, or choose dataset {' or '.join(names)}"
        )
