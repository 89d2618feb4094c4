"""Data sets of the Hugging Face Hub: files of one commit, whose columns are fields of ``custom`` rows.

``workload.path`` names the data set, ``workload.revision`` the commit, ``workload.split`` and a folder behind the
name the files: those with the split in their names. Formats: JSON Lines, JSON, CSV and Parquet.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.errors import DatasetError, ProfileError
from benchctl.profile.model import Workload
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, decoding_problem, read_csv_records
from benchctl.workload.datasets.base import (
    OwnDataset,
    Prompt,
    Selection,
    SourceFile,
    read_file,
    read_jsonl_rows,
    sha256_of,
)
from benchctl.workload.datasets.hub import hub_file, hub_filenames, package_missing
from benchctl.workload.datasets.own.custom import prompts_of_rows
from benchctl.workload.tokenizers import Tokenizer

_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".parquet")
_NUM_NAMED: Final = 8


def huggingface_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected rows of all files of the split, in the order of the files' names."""
    paths = (file.path, *file.more_paths)
    located = (
        (f"{path}:{number}", fields) for path in paths for number, fields in _read_fields(path, file.dataset)
    )
    return prompts_of_rows(located, file, selection)


def _find(workload: Workload) -> SourceFile:
    """The files of the split, fetched. Raises ProfileError for keys that do not name them."""
    repository, folder = _repository_and_folder(workload.path)
    revision = workload.revision
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        raise ProfileError(
            f"workload.revision is {revision or 'missing'}, but data sets change; name the commit, 40 hex digits, "
            "that the page 'Files and versions' of the data set shows"
        )
    if folder.endswith(_SUFFIXES):
        names = [folder]  # from the library's cache, where it is, without a network
    else:
        names = _names_of_split(hub_filenames(repository, revision), folder, workload)
    path, *more = [hub_file(repository, name, revision) for name in names]
    digests = [sha256_of(each) for each in (path, *more)]
    digest = digests[0] if not more else hashlib.sha256("".join(digests).encode()).hexdigest()
    return SourceFile(
        path=path,
        more_paths=tuple(more),
        kind="huggingface",
        dataset=f"{repository}@{revision[:12]}/sha256-{digest[:16]}",
        columns=workload.columns,
    )


def _repository_and_folder(path: str | None) -> tuple[str, str]:
    parts = [] if path is None else path.strip("/").split("/")
    if len(parts) < 2:  # an owner and a name
        raise ProfileError(
            f"workload.path is {path or 'missing'} with dataset huggingface; name a data set as owner/name, "
            "such as openai/gsm8k, or openai/gsm8k/main for one folder of it"
        )
    return "/".join(parts[:2]), "/".join(parts[2:])


def _names_of_split(names: Sequence[str], folder: str, workload: Workload) -> list[str]:
    """Data files below the folder with the split in their names, all in one folder. Raises ProfileError else."""
    inside = [name for name in names if name.endswith(_SUFFIXES) and _is_below(name, folder)]
    split = workload.split
    chosen = [name for name in inside if split is None or split in re.split(r"[/._-]", name)]
    listed = ", ".join((inside or list(names))[:_NUM_NAMED])
    if not chosen:
        what = "data file" if split is None else f"file of split {split}"
        raise ProfileError(
            f"workload.path is {workload.path}, where no {what} ({', '.join(_SUFFIXES)}) was found; it has {listed}"
        )
    stems = {re.sub(r"\d+-of-\d+", "", name) for name in chosen}
    if len(stems) > 1:
        raise ProfileError(
            f"workload.path is {workload.path} and workload.split {split}, which are several sets of rows: "
            f"{', '.join(chosen[:_NUM_NAMED])}; name the split, or one folder or file behind owner/name"
        )
    return chosen


def _is_below(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


def _read_fields(path: Path, dataset: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows by name of column, numbered from 1. Raises DatasetError for a file that is not what its suffix says."""
    remedy = f"the file of {dataset} is damaged or of another format"
    try:
        match path.suffix:
            case ".jsonl":
                yield from read_jsonl_rows(path, dict[str, Any], remedy)
            case ".json":
                yield from enumerate(_json_rows(path, remedy), start=1)
            case ".csv":
                yield from ((number - 1, fields) for number, fields in read_csv_records(path, ROWS_BYTES))
            case _:
                yield from enumerate(_parquet_rows(path, dataset), start=1)
    except UnreadableError as error:
        raise DatasetError(f"{error}; {remedy}") from error


def _json_rows(path: Path, remedy: str) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(read_file(path), type=list[dict[str, Any]])
    except DECODING_ERRORS as error:
        raise DatasetError(f"{path}: {decoding_problem(error)}; {remedy}") from error


def _parquet_rows(path: Path, dataset: str) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an optional package, and large
    except ImportError as error:
        raise package_missing("pyarrow", dataset) from error
    try:
        metadata = parquet.read_metadata(path)
        num_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        if num_bytes > ROWS_BYTES:
            raise DatasetError(f"{path}: holds {num_bytes / 1e9:.1f} GB of rows; name a smaller file of {dataset}")
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, OverflowError, ArrowException) as error:
        problem = decoding_problem(error)
        raise DatasetError(f"{path}: {problem}; the file of {dataset} is damaged or of another format") from error
    return rows


DATASET: Final = OwnDataset(find=_find, read=huggingface_prompts)
