"""``benchctl workloads``: the calibration workloads, and a lint of anyone's load-generator configuration."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchctl.cli.screen import folding_console
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.writers.inference_perf import write_inference_perf
from benchctl.profile.choices import MAX_CONCURRENCY, MAX_DEVICES
from benchctl.records.peaks import resolved_hardware
from benchctl.report.table import table_of
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.model_file import read_model
from benchctl.steptime.source import StepTimeSource, fitted_source, roofline_source
from benchctl.steptime.work import Deployment
from benchctl.units import MS_PER_S
from benchctl.workload.calibration import WORKLOADS, CalibrationWorkload, calibration_workload
from benchctl.workload.datasets.dataset import meanings_of_datasets
from benchctl.workload.lint.lint import LintOptions, LintResult, lint_config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Calibration workloads and datasets: list, show, export; lint of other tools' loads.",
)

_Names = Annotated[list[str] | None, typer.Argument(help="W1 to W5 and V1; by default all.", metavar="[NAME]...")]
_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Directory of the files.", show_default=False),
]
_Url = Annotated[str, typer.Option("--base-url", metavar="URL", help="Address of the server in the files.")]
_Files = Annotated[list[Path], typer.Argument(help="Configurations of inference-perf, as YAML.", metavar="FILE...")]
_Model = Annotated[
    str | None,
    typer.Option("--model", help="Model whose load is predicted: a known name, or a directory with a config.json."),
]
_Hardware = Annotated[str | None, typer.Option("--hardware", metavar="NAME", help="Device of the server.")]
_Devices = Annotated[
    int, typer.Option("--tensor-parallel", min=1, max=MAX_DEVICES, help="Devices that share each layer.")
]
_StepTimeModel = Annotated[
    Path | None,
    typer.Option("--step-time-model", metavar="FILE", help="A fitted model, in place of the roofline."),
]
_MaxSeqs = Annotated[
    int, typer.Option("--max-num-seqs", min=1, max=MAX_CONCURRENCY, help="Sequences in one batch at most.")
]
_KvTokens = Annotated[
    float | None,
    typer.Option(
        "--kv-tokens", min=1, max=1e12, help="Tokens in the server's KV cache; by default what the memory holds."
    ),
]


@app.command("list")
def list_workloads() -> None:
    """List the calibration workloads with their profiles, and the datasets that a profile may name."""
    headings = ("name", "profile", "requests", "determines")
    rows = ((each.name, each.profile, each.num_requests, each.purpose) for each in WORKLOADS.values())
    console = folding_console()
    console.print(table_of(headings, rows, left={*headings} - {"requests"}).drawn(folds=True))
    console.print("")
    datasets = table_of(("dataset", "prompts"), meanings_of_datasets().items(), left=("dataset", "prompts"))
    console.print(datasets.drawn(folds=True))


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="W1 to W5 or V1.")]) -> None:
    """Print the stages of one workload."""
    workload = calibration_workload(name)
    print(f"{workload.name}: {workload.purpose}{'; ' + workload.remark if workload.remark else ''}")
    print(f"run it: benchctl run {workload.profile}")
    for stage in workload.stages:
        print(
            f"  prompts of {stage.prompt_tokens}, outputs of {stage.output_tokens}, {stage.concurrency} open, "
            f"{stage.num_requests} requests"
        )


@app.command("export")
def export(
    names: _Names = None,
    output: _Output = None,
    base_url: _Url = "http://127.0.0.1:8000",
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Model that requests name; by default the server's own.")
    ] = None,
) -> None:
    """Write workloads as configurations of inference-perf."""
    if output is None:
        raise UsageError("name the directory of the files with --output")
    for workload in _workloads(names):
        for path in write_inference_perf(workload, output, base_url=base_url, model_name=model_name):
            print(path)


@app.command("lint")
def lint(
    files: _Files,
    model: _Model = None,
    hardware: _Hardware = None,
    devices: _Devices = 1,
    step_time_model: _StepTimeModel = None,
    max_num_seqs: _MaxSeqs = 256,
    kv_tokens: _KvTokens = None,
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
        print(json.dumps([asdict(finding) for result in results for finding in result.findings], indent=2))
    else:
        for result in results:
            _print_result(result)
        if source is None:
            print("concurrency and saturation are not predicted: name --model and --hardware")
        else:
            bound = ": a bound, real servers are slower" if source.is_bound else ""
            print(f"predicted by the {source.words}{bound}")
    if any(result.has_errors or (is_strict and result.findings) for result in results):
        raise typer.Exit(1)


def _print_result(result: LintResult) -> None:
    for finding in result.findings:
        print(finding)
    for each in result.predicted:
        stage, load = each.stage, each.load
        offered = f"{stage.rate:g} requests/s" if stage.rate is not None else f"{stage.concurrency} open"
        print(
            f"{result.path}: stage {stage.index}, {offered}: concurrency {load.concurrency:.3g}, "
            f"{load.utilisation:.1%} of capacity, TTFT {load.ttft_s * MS_PER_S:.3g} ms, "
            f"TPOT {load.tpot_s * MS_PER_S:.3g} ms, {load.output_tokens_per_s:.3g} output tokens/s"
        )
    if not result.findings:
        print(f"ok {result.path}")


def _source(
    model: str | None, hardware: str | None, devices: int, fitted: Path | None, max_num_seqs: int
) -> StepTimeSource | None:
    if model is None and hardware is None and fitted is None:
        return None
    if model is None:
        raise UsageError("--model is missing: a prediction of the load needs the model's shape")

    step_time = _step_time_model(fitted) if fitted is not None else None
    if (device := hardware or (step_time.hardware if step_time else None)) is None:
        raise UsageError("--hardware is missing: a prediction of the load needs it, or --step-time-model")
    deployment = Deployment(
        shape=shape_for(model), hardware=hardware_for(resolved_hardware(device)), tensor_parallel=devices
    )
    source = (
        roofline_source(deployment, max_num_seqs=max_num_seqs)
        if step_time is None
        else fitted_source(step_time, deployment, max_num_seqs=max_num_seqs)
    )
    if source.limits.kv_tokens == 0:
        raise UsageError(
            f"--model {model} does not fit on {devices} x {device}: its weights leave no memory for a KV cache; "
            "raise --tensor-parallel, or name larger --hardware"
        )
    return source


def _step_time_model(path: Path) -> StepTimeModel:

    return read_model(path)


def _workloads(names: list[str] | None) -> tuple[CalibrationWorkload, ...]:

    return tuple(calibration_workload(name) for name in names) if names else tuple(WORKLOADS.values())
