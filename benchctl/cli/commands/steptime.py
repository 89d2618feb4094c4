"""Output that the commands of ``benchctl steptime`` share: the fit, pictures and the files written.

``benchctl steptime``: fit, judge, use and carry over a model of step time.
"""

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchctl.analysis.step_time.observed import StepSources
from benchctl.cli.commands.flops import guided
from benchctl.cli.options.step_time import (
    ConstraintOption,
    ExpertsOption,
    FittedArgument,
    HardwareOption,
    HoldOutOption,
    JsonOption,
    ModelOption,
    OutputOption,
    PictureOption,
    ProfileOutOption,
    RidgeOption,
    ShapesOption,
    SourcesArgument,
    StructureOption,
    TensorParallelOption,
    fit_options,
    read_steps,
)
from benchctl.cli.screen import print_json, wide_console
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.formats import count_of, four_digits
from benchctl.interop.readers.request_times import read_overheads
from benchctl.profile.choices import MAX_CONCURRENCY, MAX_CONTEXT, MAX_DEVICES
from benchctl.records.peaks import resolved_hardware
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.models import draw_fit
from benchctl.report.model_documents import (
    bucket_document,
    diagnosis_document,
    evaluations_document,
    model_document,
)
from benchctl.report.tables.models import (
    accuracy_table,
    bucket_table,
    coefficient_table,
    column_table,
    diagnosis_lines,
    evaluation_table,
    outside_words,
    run_table,
    source_lines,
)
from benchctl.steptime.diagnosis.buckets import buckets
from benchctl.steptime.diagnosis.diagnose import Diagnosis
from benchctl.steptime.diagnosis.diagnose import diagnose as diagnose_model
from benchctl.steptime.diagnosis.evaluate import Evaluation, compare_structures, hold_out, judge
from benchctl.steptime.diagnosis.predictions import Predictions, predict_runs
from benchctl.steptime.fitting.calibrate import calibrate as calibrate_model
from benchctl.steptime.fitting.design import group_label
from benchctl.steptime.fitting.fit import FitOptions, fit_model
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.model_file import read_model, write_model
from benchctl.steptime.work import Deployment, one_step
from benchctl.workload.next_runs import measured_engine, named_as_measured, profile_text_of_runs


def draw_fitted(path: Path, fitted: StepTimeModel, steps: StepSources, evaluation: Evaluation | None) -> None:

    if evaluation is not None:
        write_picture(path, evaluation.predictions, picture_title(evaluation))
    else:
        title = f"Step time on {fitted.hardware}: {fitted.structure}, fitted to these steps"
        write_picture(path, predict_runs(fitted, steps.observed), title)


def picture_title(evaluation: Evaluation) -> str:
    device = evaluation.predictions.runs[0].deployment.hardware.name
    how = (
        f"each {evaluation.by} predicted by a fit to the others" if evaluation.is_held_out else "one model for all"
    )
    return f"Step time on {device}: {evaluation.structure}, {how}"


def write_picture(path: Path, predictions: Predictions, title: str) -> None:
    """Write the predictions of a fit as a picture."""
    path.write_bytes(picture_bytes(draw_fit(predictions), title, suffix=path.suffix))


def print_fit(fitted: StepTimeModel, steps: StepSources, evaluation: Evaluation | None, by: str) -> None:

    console = wide_console()
    print_lines(console, source_lines(fitted, steps.skipped))
    console.print()
    console.print(coefficient_table(fitted))
    if (alpha := fitted.overheads) is not None:
        console.print(
            f"alpha, of {count_of(alpha.num_requests, 'request')}: {four_digits(alpha.arrival_us)} us until queued,"
            f" {four_digits(alpha.departure_us)} us after the last step, and "
            f"{four_digits(alpha.departure_us_per_token)} us more for each output token"
        )
    console.print()
    if evaluation is not None:
        console.print(evaluation_table([evaluation]))
        return
    whole = judge(fitted, steps.observed, "run").whole
    console.print(accuracy_table("Errors on the steps of the fit itself", "steps", [("all", whole)]))
    console.print(f"only one {by}: add another to know the errors on unseen ones")


def print_files(output: Path | None, picture: Path | None) -> None:
    for name, path in (("model", output), ("picture", picture)):
        if path is not None:
            print(f"{name}: {path}")


def print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line)


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Fit a model of step time to step logs, judge it on unseen runs, predict with it; the floor of guidance.",
)


@app.command("fit")
def fit(
    sources: SourcesArgument,
    output: OutputOption = None,
    structure: StructureOption = "overlap",
    experts: ExpertsOption = "uniform",
    constraint: ConstraintOption = "non-negative",
    ridge: RidgeOption = None,
    hold_out: HoldOutOption = "run",
    picture: PictureOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    tp: TensorParallelOption = 1,
    shape: ShapesOption = None,
    requests: Annotated[
        Path | None,
        typer.Option("--requests", metavar="FILE", help="Server's timestamps of requests: adds their overheads."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit a model to the steps of SOURCES, and judge it on each run or model left out."""
    steps = read_steps(sources, model, hardware, tp, shape)
    options = fit_options(structure, experts, constraint, ridge)
    fitted = fit_model(steps.observed, options, fitted_on=dt.datetime.now(dt.UTC).date().isoformat())
    evaluation = _held_out(steps, options, hold_out)
    if evaluation is not None:
        fitted = replace(fitted, provenance=replace(fitted.provenance, held_out=(evaluation.summary(),)))
    if requests is not None:
        fitted = replace(fitted, overheads=read_overheads(requests))
    if output is not None:
        write_model(output, fitted)
    if picture is not None:
        draw_fitted(picture, fitted, steps, evaluation)
    if as_json:
        print_json(
            {"model": model_document(fitted), "held_out": evaluations_document([evaluation] if evaluation else [])}
        )
        return
    print_fit(fitted, steps, evaluation, hold_out)
    print_files(output, picture)


@app.command("evaluate")
def evaluate(
    sources: SourcesArgument,
    fitted: Annotated[
        Path | None,
        typer.Option("--fitted", metavar="MODEL", help="Judge this model instead of fits to the other groups."),
    ] = None,
    structure: StructureOption = "overlap",
    experts: ExpertsOption = "uniform",
    constraint: ConstraintOption = "non-negative",
    ridge: RidgeOption = None,
    hold_out: HoldOutOption = "run",
    picture: PictureOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    tp: TensorParallelOption = 1,
    shape: ShapesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Errors on unseen runs or models, beside those of the published form and of the roofline."""
    steps = read_steps(sources, model, hardware, tp, shape)
    if fitted is not None:
        evaluations: tuple[Evaluation, ...] = (judge(_load(fitted), steps.observed, hold_out),)
    else:
        options = fit_options(structure, experts, constraint, ridge)
        evaluations = compare_structures(steps.observed, options, hold_out)
    by_bucket = buckets(evaluations[0].predictions)
    if picture is not None:
        write_picture(picture, evaluations[0].predictions, picture_title(evaluations[0]))
    if as_json:
        print_json({"evaluations": evaluations_document(evaluations), "buckets": bucket_document(by_bucket)})
        return
    console = wide_console()
    print_lines(console, [f"not used: {line}" for line in steps.skipped])
    console.print(evaluation_table(evaluations))
    console.print()
    console.print(bucket_table(by_bucket))
    print_files(None, picture)


@app.command("predict")
def predict(
    fitted: FittedArgument,
    model: Annotated[str, typer.Option("--model", help="Model that is served: a built-in name or a directory.")],
    batch: Annotated[int, typer.Option("--batch", min=0, max=MAX_CONCURRENCY, help="Decoding rows.")] = 1,
    context: Annotated[
        int, typer.Option("--context", min=0, max=MAX_CONTEXT, help="Tokens that each of them has in the cache.")
    ] = 1024,
    prefill: Annotated[
        int, typer.Option("--prefill", min=0, max=MAX_CONTEXT, help="New prompt tokens in the step, as one prompt.")
    ] = 0,
    prompt_context: Annotated[
        int,
        typer.Option(
            "--prompt-context", min=0, max=MAX_CONTEXT, help="Tokens of this prompt in the cache already."
        ),
    ] = 0,
    tp: Annotated[int, typer.Option("--tp", min=1, max=MAX_DEVICES, help="Tensor-parallel size.")] = 1,
    hardware: Annotated[str | None, typer.Option("--hardware", help="Device; that of MODEL by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time of one step with its 90% interval, and the features that it adds up from."""
    if prompt_context and not prefill:
        raise UsageError(f"--prompt-context {prompt_context} without a prompt: give its new tokens with --prefill")
    step_time = _load(fitted)
    device = hardware_for(resolved_hardware(hardware) if hardware else step_time.hardware)
    deployment = Deployment(shape=shape_for(model), hardware=device, tensor_parallel=tp)
    work = one_step(
        num_decodes=batch,
        context=context,
        num_prefills=1.0 if prefill else 0.0,
        prompt_tokens=prefill,
        prompt_context=prompt_context,
    )
    value_us = float(step_time.predict_us(work, deployment))
    low_us, high_us = (float(bound[0]) for bound in step_time.interval_us(work, deployment))
    outside = outside_words(step_time, work)
    features = {name: float(amount) for name, amount in step_time.columns(work, deployment).items()}
    if as_json:
        print_json(
            {
                "step_us": value_us,
                "low_us": low_us,
                "high_us": high_us,
                "level": 0.9,
                "outside": outside,
                "features": features,
            }
        )
        return
    what = f"{batch} rows at context {context}"
    if prefill:
        what += f" and a prompt of {prefill} tokens" + (f" behind {prompt_context}" if prompt_context else "")
    bounds = f"{four_digits(low_us / 1e3)} to {four_digits(high_us / 1e3)}"
    beyond = f", outside of what was fitted: {'; '.join(outside)}" if outside else ""
    print(
        f"{deployment.shape.name}, TP{tp} on {device.title}, {what}: "
        f"{four_digits(value_us / 1e3)} ms ({bounds}){beyond}"
    )
    for name, value in step_time.values.items():
        amount = features.get(name, 0.0)
        print(f"  {name}: {four_digits(amount)} times {four_digits(value)} is {four_digits(amount * value)} us")


@app.command("calibrate")
def calibrate(
    fitted: FittedArgument,
    sources: SourcesArgument,
    output: OutputOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    tp: TensorParallelOption = 1,
    shape: ShapesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Carry MODEL to other hardware with two scalars, from a few steps measured there."""
    source = _load(fitted)
    steps = read_steps(sources, model, hardware, tp, shape)
    carried, scales = calibrate_model(source, steps.observed, fitted_on=dt.datetime.now(dt.UTC).date().isoformat())
    whole = judge(carried, steps.observed, "run").whole
    if output is not None:
        write_model(output, carried)
    if as_json:
        print_json({"scales": asdict(scales), "in_sample": asdict(whole), "model": model_document(carried)})
        return
    console = wide_console()
    console.print(
        f"from {source.hardware} to {carried.hardware}: times bound by arithmetic times {scales.compute:.4g}, by "
        f"memory times {scales.memory:.4g} (condition number {scales.condition:.3g})"
    )
    console.print(accuracy_table("Errors on the same steps", "steps", [("all", whole)]))
    print_files(output, None)


@app.command("diagnose")
def diagnose(
    sources: SourcesArgument,
    structure: StructureOption = "overlap",
    experts: ExpertsOption = "uniform",
    constraint: ConstraintOption = "non-negative",
    ridge: RidgeOption = None,
    hold_out: HoldOutOption = "run",
    model: ModelOption = None,
    hardware: HardwareOption = None,
    tp: TensorParallelOption = 1,
    shape: ShapesOption = None,
    profile_out: ProfileOutOption = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Engine of that profile; by default the one that was measured."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Health of a fit to SOURCES: features, coefficients, errors by bucket, and the runs to add next."""
    steps = read_steps(sources, model, hardware, tp, shape)
    options = fit_options(structure, experts, constraint, ridge)
    diagnosis = diagnose_model(
        fit_model(steps.observed, options), steps.observed, options, _held_out(steps, options, hold_out)
    )
    if profile_out is not None and diagnosis.runs_to_add:
        _write_profile(profile_out, sources, steps, diagnosis, engine)
    if as_json:
        print_json(diagnosis_document(diagnosis))
        return
    console = wide_console()
    for table in (column_table(diagnosis), bucket_table(diagnosis.buckets)):
        console.print(table)
        console.print()
    print_lines(console, diagnosis_lines(diagnosis))
    if diagnosis.runs_to_add:
        console.print()
        console.print(run_table(diagnosis))
        if profile_out is not None:
            print(f"profile: {profile_out}")
    elif profile_out is not None:
        print(f"no profile is written to {profile_out}: no run would determine the coefficients much better")


app.command("guided")(guided)


def _write_profile(
    path: Path, sources: Sequence[Path], steps: StepSources, diagnosis: Diagnosis, engine: str | None
) -> None:

    runs = named_as_measured(diagnosis.runs_to_add, steps.observed)
    text = profile_text_of_runs(runs, engine=engine or measured_engine(sources), seed=len(steps.observed))
    path.write_text(text, encoding="utf-8")


def _load(path: Path) -> StepTimeModel:

    return read_model(path)


def _held_out(steps: StepSources, options: FitOptions, by: Any) -> Evaluation | None:
    """Errors on groups left out; None where there is only one group."""
    if len({group_label(run, by) for run in steps.observed}) < 2:
        return None
    return hold_out(steps.observed, options, by)
