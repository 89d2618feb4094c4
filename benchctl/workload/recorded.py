"""The recorded load of a profile: a trace without its texts, repeated and scaled as the profile says."""

from pathlib import Path

from benchctl.errors import DatasetError, ProfileError
from benchctl.profile.model import Profile
from benchctl.workload.datasets.dataset import FileDataset, dataset_named, names_of_datasets
from benchctl.workload.datasets.files import DATA_DIRECTORY_VARIABLE, data_directory, find_source
from benchctl.workload.datasets.recorded_load import RecordedLoad


def recorded_load(profile: Profile, directory: Path | None = None) -> RecordedLoad:
    """Arrivals and lengths of the first ``num_prompts`` requests of the profile's trace.

    Raises ProfileError where the profile asks for anything but a trace with its own lengths and arrivals, and
    DatasetError where the file is not there or too short.
    """
    workload, dataset = profile.workload, dataset_named(profile.workload.dataset)
    if not isinstance(dataset, FileDataset) or dataset.read_lengths is None or workload.arrival.kind != "trace":
        names = names_of_datasets(lambda each: isinstance(each, FileDataset) and each.read_lengths is not None)
        raise ProfileError(
            f"workload.dataset is {workload.dataset} with arrival {workload.arrival.kind}: only summaries of "
            f"a trace can be kept; take {' or '.join(names)} with arrival.kind trace, or keep the requests"
        )
    odd = {"samples_per_prompt": 1, "selection": "first", "output_len": None}
    changed = [f"{key} {getattr(workload, key)}" for key, plain in odd.items() if getattr(workload, key) != plain]
    if profile.stop != "forced":
        changed.append(f"stop {profile.stop}")
    if changed:
        raise ProfileError(f"{', '.join(changed)}: a trace of which only summaries are kept is replayed as it is")
    source = find_source(dataset.file, workload.path, directory or data_directory())
    if source is None:
        raise DatasetError(
            f"dataset {dataset.file.name} is not on this machine; get it with 'benchctl data fetch "
            f"{dataset.file.name}', or set {DATA_DIRECTORY_VARIABLE}"
        )
    load = dataset.read_lengths(source)
    if len(load) < workload.num_prompts and not workload.repeat:
        raise DatasetError(
            f"{source.path}: {workload.num_prompts} requests are asked for, and it has {len(load)}; lower "
            "workload.num_prompts, or set workload.repeat"
        )
    return load.repeated(workload.num_prompts).faster(workload.arrival.speedup)
