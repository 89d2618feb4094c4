"""``benchctl data``: list, fetch and verify the dataset files that workloads read."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from benchctl.cli.failures import drawing
from benchctl.cli.screen import folding_console
from benchctl.errors import DatasetError
from benchctl.formats import megabytes
from benchctl.report.table import table_of
from benchctl.workload.datasets.dataset import dataset_file, dataset_files
from benchctl.workload.datasets.fetch import fetch_dataset
from benchctl.workload.datasets.files import DatasetFile, FileState, data_directory, file_state

app = typer.Typer(add_completion=False, help="List, fetch and verify dataset files.", no_args_is_help=True)


@app.command("list")
def list_files() -> None:
    """List all dataset files with state (judged by size), path, size and licence."""
    directory = data_directory()
    _print_table(directory, [(file, file_state(file, directory, full=False)) for file in dataset_files().values()])


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="Dataset, for example gsm8k; 'benchctl data list' lists all.")],
) -> None:
    """Download a dataset file into the data directory and verify it; a broken download from the hub resumes."""
    file = dataset_file(name)
    with tqdm(
        desc=name,
        total=file.size_bytes,
        unit="B",
        unit_scale=True,
        disable=None,
        file=drawing(sys.stderr),
        leave=False,
    ) as bar:
        path = fetch_dataset(file, data_directory(), bar)
    print(f"{name}: {path} ({megabytes(file.size_bytes)}, {file.licence}, sha256 checked)")


@app.command("verify")
def verify(
    name: Annotated[str | None, typer.Argument(help="One dataset; by default all that are present.")] = None,
) -> None:
    """Compare dataset files with their pinned sha256. Exit code: 2 if one is damaged, or a named one missing."""
    directory = data_directory()
    files = dataset_files().values() if name is None else [dataset_file(name)]
    states = [(file, file_state(file, directory, full=True)) for file in files]
    _print_table(directory, states)
    for file, state in states:
        if state == "damaged" or (state == "missing" and name is not None):
            raise DatasetError(
                f"{file.path_in(directory)} is {state}; run 'benchctl data fetch {file.name}' to get it"
            )


def _print_table(directory: Path, states: Iterable[tuple[DatasetFile, FileState]]) -> None:

    headings = ("name", "state", "size", "licence", "file", "source")
    rows = (
        (
            file.name,
            state,
            megabytes(file.size_bytes),
            file.licence,
            f"{file.folder}/{file.filename}",
            file.source_page,
        )
        for file, state in states
    )
    console = folding_console()
    console.print(table_of(headings, rows, left={*headings} - {"size"}).drawn(folds=True))
    console.print(f"data directory: {directory} (set BENCHCTL_DATA_DIR for another)", soft_wrap=True)
