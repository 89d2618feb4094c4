"""Output that the commands of ``benchctl steptime`` share: the fit, pictures and the files written."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from benchctl.cli.output.screen import wide_console
from benchctl.formats import count_of, four_digits

if TYPE_CHECKING:
    from rich.console import Console

    from benchctl.analysis.step_time.sources import StepSources
    from benchctl.steptime.diagnosis.evaluate import Evaluation
    from benchctl.steptime.diagnosis.predictions import Predictions
    from benchctl.steptime.model import StepTimeModel


def draw_fitted(path: Path, fitted: "StepTimeModel", steps: "StepSources", evaluation: "Evaluation | None") -> None:
    from benchctl.steptime.diagnosis.predictions import predict_runs

    if evaluation is not None:
        write_picture(path, evaluation.predictions, picture_title(evaluation))
    else:
        title = f"Step time on {fitted.hardware}: {fitted.structure}, fitted to these steps"
        write_picture(path, predict_runs(fitted, steps.observed), title)


def picture_title(evaluation: "Evaluation") -> str:
    device = evaluation.predictions.runs[0].deployment.hardware.name
    how = (
        f"each {evaluation.by} predicted by a fit to the others" if evaluation.is_held_out else "one model for all"
    )
    return f"Step time on {device}: {evaluation.structure}, {how}"


def write_picture(path: Path, predictions: "Predictions", title: str) -> None:
    from benchctl.report.plots.step_time_fit import draw_fit

    path.write_bytes(draw_fit(predictions, title))


def print_fit(fitted: "StepTimeModel", steps: "StepSources", evaluation: "Evaluation | None", by: str) -> None:
    from benchctl.report.text.step_time_fit import accuracy_table, coefficient_table, evaluation_table, source_lines
    from benchctl.steptime.diagnosis.evaluate import judge

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


def print_lines(console: "Console", lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line)
