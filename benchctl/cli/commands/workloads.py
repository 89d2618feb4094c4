"""``benchctl workloads``: the calibration workloads, and a lint of anyone's load-generator configuration.

``benchctl data``: list, fetch and verify the dataset files that workloads read.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from benchctl.cli.screen import bar, print_json, say, text_console
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import DatasetError, UsageError
from benchctl.profile.bounds import MAX_CONCURRENCY, MAX_DEVICES
from benchctl.profile.choices import DATASETS
from benchctl.records.peaks import resolved_hardware
from benchctl.report.table import table_of
from benchctl.steptime.model import read_model
from benchctl.steptime.queueing import StepTimeSource, step_time_source
from benchctl.steptime.work import Deployment
from benchctl.units import MS_PER_S, megabytes
from benchctl.workload.calibration import WORKLOADS, calibration_workload, write_inference_perf
from benchctl.workload.datasets.base import (
    DatasetFile,
    FileState,
    data_directory,
    dataset_file,
    dataset_files,
    dataset_named,
    file_state,
)
from benchctl.workload.datasets.published import fetch_dataset
from benchctl.workload.lint import LintOptions, LintResult, lint_config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Calibration workloads and datasets: list, show, export; lint of other tools' loads.",
)
data = typer.Typer(add_completion=False, help="List, fetch and verify dataset files.", no_args_is_help=True)


@app.command("list")
def list_workloads() -> None:
    """List the calibration workloads with their profiles, and the datasets that a profile may name."""
    headings = ("name", "profile", "requests", "determines")
    rows = ((each.name, each.profile, each.num_requests, each.purpose) for each in WORKLOADS.values())
    console = text_console()
    console.print(table_of(headings, rows, left={*headings} - {"requests"}))
    console.print("")
    meanings = ((name, dataset_named(name).meaning) for name in DATASETS)
    console.print(table_of(("dataset", "prompts"), meanings, left=("dataset", "prompts")))


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="W1 to W5 or V1.")]) -> None:
    """Print the stages of one workload."""
    workload = calibration_workload(name)
    say(f"{workload.name}: {workload.purpose}{'; ' + workload.remark if workload.remark else ''}")
    say(f"run it: benchctl run {workload.profile}")
    for stage in workload.stages:
        say(
            f"  prompts of {stage.prompt_tokens}, outputs of {stage.output_tokens}, {stage.concurrency} open, "
            f"{stage.num_requests} requests"
        )


@app.command("export")
def export(
    names: Annotated[
        list[str] | None, typer.Argument(help="W1 to W5 and V1; by default all.", metavar="[NAME]...")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Directory of the files."),
    ] = None,
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="Address of the server in the files.")
    ] = "http://127.0.0.1:8000",
    model_name: Annotated[
        str | None, typer.Option(help="Model that requests name; by default the server's own.")
    ] = None,
) -> None:
    """Write workloads as configurations of inference-perf."""
    if output is None:
        raise UsageError("name the directory of the files with --output")
    for workload in map(calibration_workload, names or WORKLOADS):
        for path in write_inference_perf(workload, output, base_url=base_url, model_name=model_name):
            print(path)


@app.command("lint")
def lint(
    files: Annotated[
        list[Path], typer.Argument(help="Configurations of inference-perf, as YAML.", metavar="FILE...")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Model whose load is predicted: a known name, or a directory with a config.json."),
    ] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help="Device of the server.")] = None,
    devices: Annotated[
        int, typer.Option("--tensor-parallel", min=1, max=MAX_DEVICES, help="Devices that share each layer.")
    ] = 1,
    step_time_model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A fitted model, in place of the roofline.")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Sequences in one batch at most.")
    ] = 256,
    kv_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=1e12, help="Tokens in the server's KV cache; by default what the memory holds."),
    ] = None,
    has_no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-caching", help="The server runs without a prefix cache.")
    ] = False,
    is_strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Check configurations of inference-perf for loads that do not measure what the file says.

    With a model and its hardware it also predicts concurrency by Little's law, and saturation.
    Exit code: 1 with errors, 2 for a file that cannot be read, else 0.
    """
    source = _source(model, hardware, devices, step_time_model, max_num_seqs)
    options = LintOptions(source=source, kv_tokens=kv_tokens, has_prefix_cache=not has_no_prefix_cache)
    results = [lint_config(path, options) for path in files]
    if as_json:
        print_json([finding for result in results for finding in result.findings])
    else:
        for result in results:
            _print_result(result)
        if source is None:
            say("concurrency and saturation are not predicted: name --model and --hardware")
        else:
            bound = ": a bound, real servers are slower" if source.is_bound else ""
            say(f"predicted by the {source.words}{bound}")
    if any(result.has_errors or (is_strict and result.findings) for result in results):
        raise typer.Exit(1)


def _print_result(result: LintResult) -> None:
    for finding in result.findings:
        say(str(finding))
    for each in result.predicted:
        stage, load = each.stage, each.load
        offered = f"{stage.rate:g} requests/s" if stage.rate is not None else f"{stage.concurrency} open"
        say(
            f"{result.path}: stage {stage.index}, {offered}: concurrency {load.concurrency:.3g}, "
            f"{load.utilisation:.1%} of capacity, TTFT {load.ttft_s * MS_PER_S:.3g} ms, "
            f"TPOT {load.tpot_s * MS_PER_S:.3g} ms, {load.output_tokens_per_s:.3g} output tokens/s"
        )
    if not result.findings:
        say(f"ok {result.path}")


def _source(
    model: str | None, hardware: str | None, devices: int, fitted: Path | None, max_num_seqs: int
) -> StepTimeSource | None:
    """The source of step times by which the load is predicted; None where nothing is named."""
    if model is None and hardware is None and fitted is None:
        return None
    if model is None:
        raise UsageError("--model is missing: a prediction of the load needs the model's shape")
    step_time = None if fitted is None else read_model(fitted)
    if (device := hardware or (step_time.hardware if step_time else None)) is None:
        raise UsageError("--hardware is missing: a prediction of the load needs it, or --step-time-model")
    deployment = Deployment(
        shape=shape_for(model), hardware=hardware_for(resolved_hardware(device)), tensor_parallel=devices
    )
    source = step_time_source(deployment, step_time, max_num_seqs=max_num_seqs)
    if source.limits.kv_tokens == 0:
        raise UsageError(
            f"--model {model} does not fit on {devices} x {device}: its weights leave no memory for a KV cache; "
            "raise --tensor-parallel, or name larger --hardware"
        )
    return source


@data.command("list")
def list_files() -> None:
    """List all dataset files with state (judged by size), path, size and licence."""
    directory = data_directory()
    _print_table(directory, [(file, file_state(file, directory, full=False)) for file in dataset_files().values()])


@data.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="Dataset, for example gsm8k; 'benchctl data list' lists all.")],
) -> None:
    """Download a dataset file into the data directory and verify it."""
    file = dataset_file(name)
    with bar(desc=name, total=file.size_bytes, unit="B", unit_scale=True, leave=False) as progress:
        path = fetch_dataset(file, data_directory(), progress)
    say(f"{name}: {path} ({megabytes(file.size_bytes)}, {file.licence}, sha256 checked)")


@data.command("verify")
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
    console = text_console()
    console.print(table_of(headings, rows, left={*headings} - {"size"}, extra=("source",)))
    console.print(f"data directory: {directory} (set BENCHCTL_DATA_DIR for another)")
