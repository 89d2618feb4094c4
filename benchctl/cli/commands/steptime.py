"""``benchctl steptime``: fit, judge, use and carry over a model of step time."""

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchctl.analysis.experiment.observed import StepSources, read_sources
from benchctl.cli.commands.flops import guided
from benchctl.cli.options import AsJson, with_options
from benchctl.cli.screen import drawable, tell
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults
from benchctl.profile.bounds import MAX_CONCURRENCY, MAX_CONTEXT, MAX_DEVICES
from benchctl.records.peaks import resolved_hardware
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.models import draw_fit
from benchctl.report.model_documents import (
    bucket_document,
    diagnosis_document,
    evaluations_document,
    model_document,
)
from benchctl.report.model_tables import (
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
from benchctl.report.table import Table
from benchctl.steptime.design import group_label
from benchctl.steptime.diagnose import diagnose as diagnose_model
from benchctl.steptime.evaluate import (
    Evaluation,
    Predictions,
    buckets,
    compare_structures,
    hold_out,
    judge,
    predict_runs,
)
from benchctl.steptime.fit import FitOptions, calibrate as calibrate_model, fit_model
from benchctl.steptime.model import StepTimeModel, read_model, write_model
from benchctl.steptime.work import Deployment, one_step
from benchctl.units import four_digits
from benchctl.workload.calibration import measured_engine, named_as_measured, profile_text_of_runs

_Sources = Annotated[
    list[Path],
    typer.Argument(metavar="SOURCE...", help="Result directories, and tables of steps (.csv, .jsonl)."),
]
_FittedModel = Annotated[Path, typer.Argument(metavar="MODEL", help="File that 'steptime fit -o' wrote.")]
_HoldOut = Annotated[
    Literal["run", "model", "tensor-parallel"],
    typer.Option("--hold-out", help="Groups that are left out, one at a time, to judge the model."),
]
_Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture",
        metavar="FILE.png",
        help="Write predicted against measured.",
        callback=drawable,
    ),
]
_Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="MODEL", help="Write the model here.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitForm:
    """The form of a model that is fitted."""

    structure: Annotated[
        Literal["overlap", "original", "roofline"],
        typer.Option(help="Form of the model; 'original' is the published one, 'roofline' fits nothing."),
    ] = "overlap"
    experts: Annotated[
        Literal["uniform", "linear", "measured"],
        typer.Option(help="Rule for the experts whose weights a step reads."),
    ] = "uniform"
    constraint: Annotated[Literal["non-negative", "none"], typer.Option(help="Bound of the coefficients.")] = (
        "non-negative"
    )
    ridge: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e12,
            metavar="STRENGTH",
            help="Strength of a pull to typical values; by default as the noise demands, 0 for 'original'.",
        ),
    ] = None

    @property
    def options(self) -> FitOptions:
        """The options of a fit; the published form is fitted as published, as ``evaluate`` has it beside others."""
        return FitOptions(
            structure=self.structure,
            experts_read=self.experts,
            constraint=self.constraint,
            ridge=0.0 if self.ridge is None and self.structure == "original" else self.ridge,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """Values for what a table of steps does not say itself."""

    model: Annotated[str | None, typer.Option(help="Model of a table without that column.")] = None
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Device, where neither table nor result names it, or 'measured'.",
        ),
    ] = None
    tp: Annotated[
        int,
        typer.Option(min=1, max=MAX_DEVICES, help="Tensor-parallel size of a table without that column."),
    ] = 1
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Shape of a model that a table names."),
    ] = None

    def read(self, sources: Sequence[Path]) -> StepSources:
        """The steps of result directories and tables. Raises UsageError for a shape without a directory."""
        directories = {}
        for text in self.shape or ():
            name, _, path = text.partition("=")
            if not (name and path):
                raise UsageError(f"--shape is {text!r}; write NAME=DIR, with the directory of a config.json")
            directories[name] = path
        device = None if self.hardware is None else resolved_hardware(self.hardware)
        defaults = TableDefaults(model=self.model, hardware=device, tensor_parallel=self.tp, shapes=directories)
        return read_sources(sources, defaults)


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Fit a model of step time to step logs, judge it on unseen runs, and predict with it.",
)


@app.command("fit")
@with_options
def fit(
    *,
    sources: _Sources,
    output: _Output = None,
    form: FitForm,
    hold_out: _HoldOut = "run",
    picture: _Picture = None,
    table: TableOptions,
    as_json: AsJson = False,
) -> None:
    """Fit a model to the steps of SOURCES, and judge it on each run or model left out."""
    steps = table.read(sources)
    options = form.options
    fitted = fit_model(steps.observed, options, fitted_on=_today())
    evaluation = _held_out(steps, options, hold_out)
    if evaluation is not None:
        fitted = replace(fitted, provenance=replace(fitted.provenance, held_out=(evaluation.summary(),)))
    if output is not None:
        write_model(output, fitted)
    if picture is not None:
        _draw(
            picture,
            predict_runs(fitted, steps.observed) if evaluation is None else evaluation.predictions,
            fitted.structure,
            "fitted to these steps" if evaluation is None else _manner(evaluation),
        )
    document = {
        "model": model_document(fitted),
        "held_out": evaluations_document([] if evaluation is None else [evaluation]),
    }
    files = _files(model=output, picture=picture)
    tell(document, *_fit_parts(fitted, steps, evaluation, hold_out), *files, as_json=as_json)


def _fit_parts(
    fitted: StepTimeModel, steps: StepSources, evaluation: Evaluation | None, by: str
) -> Iterator[Table | str]:
    yield from source_lines(fitted, steps.skipped)
    yield ""
    yield coefficient_table(fitted)
    yield ""
    if evaluation is not None:
        yield evaluation_table([evaluation])
        return
    whole = judge(fitted, steps.observed, "run").whole
    yield accuracy_table("Errors on the steps of the fit itself", "steps", [("all", whole)])
    yield f"only one {by}: add another to know the errors on unseen ones"


@app.command("evaluate")
@with_options
def evaluate(
    *,
    sources: _Sources,
    fitted: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Judge this model instead of new fits without each group."),
    ] = None,
    form: FitForm,
    hold_out: _HoldOut = "run",
    picture: _Picture = None,
    table: TableOptions,
    as_json: AsJson = False,
) -> None:
    """Errors on unseen runs or models, beside those of the published form and of the roofline."""
    steps = table.read(sources)
    evaluations: Sequence[Evaluation] = (
        compare_structures(steps.observed, form.options, hold_out)
        if fitted is None
        else [judge(read_model(fitted), steps.observed, hold_out)]
    )
    if picture is not None:
        _draw(picture, evaluations[0].predictions, evaluations[0].structure, _manner(evaluations[0]))
    by_bucket = buckets(evaluations[0].predictions)
    tell(
        {"evaluations": evaluations_document(evaluations), "buckets": bucket_document(by_bucket)},
        *(f"not used: {line}" for line in steps.skipped),
        evaluation_table(evaluations),
        "",
        bucket_table(by_bucket),
        *_files(picture=picture),
        as_json=as_json,
    )


@app.command("predict")
def predict(
    fitted: _FittedModel,
    model: Annotated[str, typer.Option(help="Model that is served: a built-in name or a directory.")],
    batch: Annotated[int, typer.Option(min=0, max=MAX_CONCURRENCY, help="Decoding rows.")] = 1,
    context: Annotated[
        int, typer.Option(min=0, max=MAX_CONTEXT, help="Tokens that each of them has in the cache.")
    ] = 1024,
    prefill: Annotated[
        int, typer.Option(min=0, max=MAX_CONTEXT, help="New prompt tokens in the step, as one prompt.")
    ] = 0,
    prompt_context: Annotated[
        int,
        typer.Option(min=0, max=MAX_CONTEXT, help="Tokens of this prompt in the cache already."),
    ] = 0,
    tp: Annotated[int, typer.Option(min=1, max=MAX_DEVICES, help="Tensor-parallel size.")] = 1,
    hardware: Annotated[str | None, typer.Option(help="Device; that of MODEL by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time of one step with its 90% interval, and the features that it adds up from."""
    if prompt_context and not prefill:
        raise UsageError(f"--prompt-context {prompt_context} without a prompt: give its new tokens with --prefill")
    step_time = read_model(fitted)
    device = hardware_for(resolved_hardware(hardware) if hardware else step_time.hardware)
    deployment = Deployment(shape=shape_for(model), hardware=device, tensor_parallel=tp)
    prompts = {"num_prefills": 1.0 if prefill else 0.0, "prompt_tokens": prefill, "prompt_context": prompt_context}
    work = one_step(num_decodes=batch, context=context, **prompts)
    low_us, high_us = (float(bound[0]) for bound in step_time.interval_us(work, deployment))
    document = {
        "step_us": float(step_time.predict_us(work, deployment)),
        "low_us": low_us,
        "high_us": high_us,
        "level": 0.9,
        "outside": outside_words(step_time, work),
        "features": {name: float(amount) for name, amount in step_time.columns(work, deployment).items()},
    }
    what = f"{deployment.shape.name}, TP{tp} on {device.title}, {batch} rows at context {context}"
    if prefill:
        what += f" and a prompt of {prefill} tokens" + (f" behind {prompt_context}" if prompt_context else "")
    tell(document, *_predicted_lines(what, document, step_time), as_json=as_json)


def _predicted_lines(what: str, document: dict[str, Any], step_time: StepTimeModel) -> Iterator[str]:
    predicted, low, high = (four_digits(document[name] / 1e3) for name in ("step_us", "low_us", "high_us"))
    outside = document["outside"]
    beyond = f", outside of what was fitted: {'; '.join(outside)}" if outside else ""
    yield f"{what}: {predicted} ms ({low} to {high}){beyond}"
    for name, value in step_time.values.items():
        amount = document["features"].get(name, 0.0)
        yield f"  {name}: {four_digits(amount)} times {four_digits(value)} is {four_digits(amount * value)} us"


@app.command("calibrate")
@with_options
def calibrate(
    *,
    fitted: _FittedModel,
    sources: _Sources,
    output: _Output = None,
    table: TableOptions,
    as_json: AsJson = False,
) -> None:
    """Adapt MODEL to other hardware with two factors, fitted to a few steps measured there."""
    source = read_model(fitted)
    steps = table.read(sources)
    carried, scales = calibrate_model(source, steps.observed, fitted_on=_today())
    whole = judge(carried, steps.observed, "run").whole
    if output is not None:
        write_model(output, carried)
    scaled = (
        f"from {source.hardware} to {carried.hardware}: times bound by arithmetic times {scales.compute:.4g}, by "
        f"memory times {scales.memory:.4g} (condition number {scales.condition:.3g})"
    )
    tell(
        {"scales": asdict(scales), "in_sample": asdict(whole), "model": model_document(carried)},
        scaled,
        accuracy_table("Errors on the same steps", "steps", [("all", whole)]),
        *_files(model=output),
        as_json=as_json,
    )


@app.command("diagnose")
@with_options
def diagnose(
    *,
    sources: _Sources,
    form: FitForm,
    hold_out: _HoldOut = "run",
    table: TableOptions,
    profile_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the runs to add as a profile."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine of that profile; by default the one that was measured."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how well SOURCES determine a model: features, coefficients, errors, and the runs to add next."""
    steps = table.read(sources)
    options = form.options
    diagnosis = diagnose_model(
        fit_model(steps.observed, options), steps.observed, options, _held_out(steps, options, hold_out)
    )
    last: list[Table | str] = []
    if diagnosis.runs_to_add:
        last += ("", run_table(diagnosis), *_files(profile=profile_out))
    if profile_out is not None and not diagnosis.runs_to_add:
        last.append(f"no profile is written to {profile_out}: no run would determine the coefficients much better")
    elif profile_out is not None:
        runs = named_as_measured(diagnosis.runs_to_add, steps.observed)
        text = profile_text_of_runs(runs, engine=engine or measured_engine(sources), seed=len(steps.observed))
        profile_out.write_text(text, encoding="utf-8")
    tell(
        diagnosis_document(diagnosis),
        column_table(diagnosis),
        "",
        bucket_table(diagnosis.buckets),
        "",
        *diagnosis_lines(diagnosis),
        *last,
        as_json=as_json,
    )


app.command("guided")(guided)


def _held_out(steps: StepSources, options: FitOptions, by: Any) -> Evaluation | None:
    """Errors on groups left out; None where there is only one group."""
    if len({group_label(run, by) for run in steps.observed}) < 2:
        return None
    return hold_out(steps.observed, options, by)


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


def _manner(evaluation: Evaluation) -> str:
    return (
        f"each {evaluation.by} predicted by a fit to the others" if evaluation.is_held_out else "one model for all"
    )


def _draw(path: Path, predictions: Predictions, structure: str, manner: str) -> None:
    title = f"Step time on {predictions.runs[0].deployment.hardware.name}: {structure}, {manner}"
    path.write_bytes(picture_bytes(draw_fit(predictions), title, suffix=path.suffix))


def _files(**paths: Path | None) -> Iterator[str]:
    """A line for each file that was written, by what it is."""
    return (f"{name}: {path}" for name, path in paths.items() if path is not None)
