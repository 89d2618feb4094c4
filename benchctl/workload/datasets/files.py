"""Dataset files: where each is got, where it lies, and whether it is the pinned one.

The data directory is $BENCHCTL_DATA_DIR, or the user's cache directory; a file lies in it as
``<folder>/<filename>``. Addresses name a revision, so that they cannot come to mean something else.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import platformdirs

from benchctl.errors import DatasetError
from benchctl.workload.datasets.prompt import SourceFile

DATA_DIRECTORY_VARIABLE: Final = "BENCHCTL_DATA_DIR"
FileState: TypeAlias = Literal["present", "missing", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """One published file, pinned by its sha256."""

    name: str
    """As ``workload.dataset`` names it."""
    label: str
    """What a request set made from it records as its source."""
    folder: str
    filename: str
    url: str
    sha256: str
    size_bytes: int
    licence: str
    source_page: str

    def path_in(self, directory: Path) -> Path:
        """Its place in a data directory."""
        return directory / self.folder / self.filename


_FILES: Final = (
    DatasetFile(
        name="gsm8k",
        label="gsm8k/test",
        folder="gsm8k",
        filename="test.jsonl",
        url="https://raw.githubusercontent.com/openai/grade-school-math/"
        "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/test.jsonl",
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        size_bytes=749_738,
        licence="MIT",
        source_page="https://github.com/openai/grade-school-math",
    ),
    DatasetFile(
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
    DatasetFile(
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
    DatasetFile(
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
)
DATASET_FILES: dict[str, DatasetFile] = {file.name: file for file in _FILES}


def data_directory() -> Path:
    """$BENCHCTL_DATA_DIR, or ``data`` in the user's cache directory of benchctl."""
    chosen = os.environ.get(DATA_DIRECTORY_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("benchctl")) / "data"


def dataset_file(name: str) -> DatasetFile:
    """The published file of a dataset; DatasetError for an unknown name."""
    if name not in DATASET_FILES:
        raise DatasetError(f"no dataset is called {name!r}; known are {', '.join(DATASET_FILES)}")
    return DATASET_FILES[name]


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content; DatasetError where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error


def file_state(file: DatasetFile, directory: Path, *, full: bool) -> FileState:
    """Whether a file is there and whole: by size alone, or with ``full`` by its sha256."""
    path = file.path_in(directory)
    if not path.is_file():
        return "missing"
    is_whole = sha256_of(path) == file.sha256 if full else path.stat().st_size == file.size_bytes
    return "present" if is_whole else "damaged"


def find_source(name: str, explicit: str | None, directory: Path) -> SourceFile | None:
    """The file that a workload reads: ``explicit`` where given, else the pinned one of the data directory.

    None when the data directory lacks it. An explicit file may have any content; unless it is the pinned one,
    its dataset is called after its hash. Raises DatasetError for an explicit path that is not there, and for a
    file of the data directory that is not the pinned one.
    """
    file = dataset_file(name)
    path = Path(explicit).expanduser() if explicit is not None else file.path_in(directory)
    if not path.is_file():
        if explicit is None:
            return None
        raise DatasetError(
            f"workload.path is {explicit}, which is no file; correct it, or leave it out to use the data directory"
        )
    digest = sha256_of(path)
    if digest == file.sha256:
        return SourceFile(path=path, kind=name, dataset=file.label)
    if explicit is None:
        raise DatasetError(
            f"{path} is not the pinned file of {name}: its sha256 is {digest}, expected {file.sha256}. Run "
            f"'benchctl data fetch {name}' to replace it, or name it in workload.path to use it as it is"
        )
    return SourceFile(path=path, kind=name, dataset=f"{name}/sha256-{digest[:16]}")
