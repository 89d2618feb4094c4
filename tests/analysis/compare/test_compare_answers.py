"""`benchctl compare` tells quality and divergence beside speed, and lets quality decide where that is asked for."""

import json
from pathlib import Path

import pytest
import typer
from support.results.answered_questions import Said, right, write_answers, wrong
from support.results.builders import edit_run
from typer.testing import CliRunner

from benchctl.cli.commands.compare import compare
from benchctl.errors import BenchctlError
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import load_results

app = typer.Typer()
app.command()(compare)


def worse(variant: str, block: int, i: int, sample: int) -> str:
    return wrong(i) if variant == "guided" and i % 3 == 0 else right(i)


def alike(variant: str, block: int, i: int, sample: int) -> str:
    return right(i)


def directory(path: Path, answers: Said, stop: str = "natural") -> ResultDirectory:
    return write_answers(path, answers, num_questions=60, blocks=6, stop=stop)


def run_compare(results: ResultDirectory, *options: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a comparison with a margin for times that guided answers are within."""
    sides = [f"{results.path}:{variant}" for variant in ("baseline", "guided")]
    arguments = ["--metrics", "ttft_ms", "--threshold", "80%", *options]
    result = CliRunner().invoke(app, [*sides, *arguments])
    if isinstance(result.exception, BenchctlError):
        return result.exception.exit_code, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, ""


def test_worse_answers_are_told_and_decide_nothing_by_themselves(tmp_path: Path) -> None:
    code, output, _ = run_compare(directory(tmp_path / "r", worse))
    assert "accuracy 100.0 % against 66.7 %: -33.3 points" in output
    assert "decides nothing without --quality-margin" in output
    assert "identical texts 66.7 % (240 of 360), A against itself in the next block 100.0 %" in output
    assert code == 0


def test_worse_answers_are_a_regression_where_a_margin_of_quality_is_given(tmp_path: Path) -> None:
    code, output, _ = run_compare(directory(tmp_path / "r", worse), "--quality-margin", "2")
    assert output.startswith("regression: guided against baseline: top_k=5: accuracy 100.0 % against 66.7 %")
    assert "regression at a margin of 2" in output
    assert code == 1


def test_answers_that_could_be_worse_by_more_than_the_margin_leave_it_open(tmp_path: Path) -> None:
    results = directory(tmp_path / "r", alike)
    code, output, _ = run_compare(results, "--quality-margin", "0.5")
    assert code == 3
    assert output.startswith("inconclusive: guided against baseline: top_k=5: accuracy 100.0 % against 100.0 %")
    assert run_compare(results, "--quality-margin", "20")[0] == 0


def test_the_document_holds_quality_and_divergence_of_each_cell(tmp_path: Path) -> None:
    _, output, _ = run_compare(directory(tmp_path / "r", worse), "--json", "--quality-margin", "2")
    document = json.loads(output)
    quality, divergence = document["cells"][0]["quality"], document["cells"][0]["divergence"]
    assert (quality["num_questions"], quality["a_accuracy"], quality["verdict"]) == (60, 1.0, "regression")
    assert (quality["judge"], quality["decides"], quality["only_a"]) == ("numeric 2", True, 20)
    assert quality["pass_at"]["1"]["b"] == pytest.approx(2 / 3)
    assert divergence["b_against_a"]["identical_frac"] == pytest.approx(2 / 3)
    assert divergence["a_against_a"]["identical_frac"] == 1.0
    assert document["reasons"] != []


def test_forced_answers_are_not_judged_and_the_reason_is_told(tmp_path: Path) -> None:
    results = directory(tmp_path / "r", worse, stop="forced")
    _, output, _ = run_compare(results)
    assert "answers are not judged: " in output
    assert "measured with stop: forced, where answers run on past their end" in output
    assert "accuracy" not in output
    code, _, errors = run_compare(results, "--quality-margin", "1")
    assert code == 2
    assert "--quality-margin cannot decide" in errors


def test_texts_that_a_simulator_made_up_are_neither_judged_nor_compared(tmp_path: Path) -> None:
    results = directory(tmp_path / "r", worse)
    for run in load_results(results.path).runs:
        edit_run(results, run.record.run_id, clock="virtual")
    cell = json.loads(run_compare(results, "--json")[1])["cells"][0]
    assert (cell["quality"], cell["divergence"]) == (None, None)
    code, _, errors = run_compare(results, "--quality-margin", "1")
    assert code == 2
    assert "a simulator invents its texts" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--judge", "numerik"), "did you mean 'numeric'"),
        (("--quality-margin", "-1"), "percentage points from 0 to below 100"),
    ],
)
def test_a_judge_or_margin_that_makes_no_sense_is_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    code, _, errors = run_compare(directory(tmp_path / "r", alike), *options)
    assert code == 2
    assert message in " ".join(errors.split())
