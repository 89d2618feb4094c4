"""Acceptance of draft tokens as tables of `show` and `compare`, as a chart, and in documents."""

import json

import msgspec
import pytest
from support.results.builders import edit_requests, write_results
from support.results.drafted import profile_of, write_drafted
from typer.testing import CliRunner

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import Side
from benchctl.cli.app import app
from benchctl.report.page.page import draw_charts

ACCEPTED = ((3, 2, 0, 3, 1, 3), (2, 3, 3, 0, 3, 1), (1, 3, 2, 3, 0, 3))
ARM = "guided top_k=5"


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    return write_drafted(tmp_path_factory.mktemp("drafted") / "r", ACCEPTED).path


def printed(*words):
    return CliRunner().invoke(app, [str(word) for word in words]).stdout


def test_show_tells_acceptance_by_position_marginal_and_conditional(path):
    lines = printed("show", path).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Acceptance of draft tokens"))
    assert lines[start + 1].split("  ")[0] == "cell"
    assert " ".join(lines[start + 2].split()) == f"{ARM} 144 432 288 0.667 3.00 0.833 0.667 (0.800) 0.500 (0.750)"


def test_compare_tells_it_too_and_divides_speed_into_tokens_and_time_per_step(path):
    text = printed("compare", f"{path}:baseline", f"{path}:guided")
    assert "0.667 (0.800)" in text
    assert "decode steps: 1 to 3 tokens of a sequence per step (x3.000) at 10 to 15.01 ms per step (x1.501)" in text
    assert "= passes x0.368 * steps per pass x1.000 * time per step x1.501" in text
    markdown = printed("compare", f"{path}:baseline", f"{path}:guided", "--markdown")
    assert (
        "| guided top\\_k=5 | 144 | 432 | 288 | 0.667 | 3.00 | 0.833 | 0.667 (0.800) | 0.500 (0.750) |" in markdown
    )


def test_documents_have_counts_rates_and_positions(path):
    shown = json.loads(printed("show", path, "--json"))
    compared = json.loads(printed("compare", f"{path}:baseline", f"{path}:guided", "--json"))
    (drafts,) = [cell["drafts"] for cell in shown["cells"] if cell["variant"] == "guided"]
    assert compared["cells"][0]["drafts"] == {"a": None, "b": drafts}
    assert (drafts["drafts"], drafts["draft_tokens"], drafts["accepted_tokens"]) == (144, 432, 288)
    assert [at["accepted"] for at in drafts["positions"]] == [120, 96, 72]


def test_the_factors_of_the_wall_time_multiply_to_it_exactly(path):
    comparison = compare_sides(Side(path, "baseline"), Side(path, "guided"), CompareOptions())
    wall = comparison.cells[0].decomposition.wall
    product = 1.0
    for factor in wall.parts:
        product *= factor.estimate.ratio
    assert product == pytest.approx(wall.whole.estimate.ratio, rel=1e-12)
    assert sum(factor.added_s for factor in wall.parts) == pytest.approx(wall.whole.b_s - wall.whole.a_s, rel=1e-9)
    assert comparison.cells[0].decomposition.model is not None  # several tokens per row do not stop the explanation


def test_a_chart_shows_both_kinds_of_acceptance_and_is_left_out_without_drafts(path, tmp_path):
    charts = {chart.id: chart for chart in draw_charts(analyze_directory(path))}
    rows = charts["acceptance"].spec["datasets"]["rows"]
    above, below = ([row for row in rows if row["panel"] == panel] for panel in (0, 1))
    assert [row["share"] for row in above] == pytest.approx([15 / 18, 12 / 18, 9 / 18], rel=1e-5)
    assert [row["share"] for row in below] == pytest.approx([15 / 18, 12 / 15, 9 / 12], rel=1e-5)
    assert [row["position"] for row in above] == [row["position"] for row in below] == [1, 2, 3]
    plain = write_results(tmp_path / "r").path
    assert "acceptance" not in {chart.id for chart in draw_charts(analyze_directory(plain))}
    assert "Acceptance of draft tokens" not in printed("show", plain)


def test_greedy_answers_that_drafts_change_are_a_warning_unless_they_change_by_themselves(tmp_path):
    results = write_drafted(tmp_path / "r", ACCEPTED, num_requests=40)
    results.write_profile(profile_of(3, more="sampling: {temperature: 0.0}\n"))

    def codes():
        comparison = compare_sides(Side(results.path, "baseline"), Side(results.path, "guided"), CompareOptions())
        return {warning.code: warning for warning in comparison.warnings}

    assert "greedy-answers-differ" not in codes()
    for run in results.runs():
        if "guided" in run.path.name:
            edit_requests(results, run.path.name, with_other_texts)
    assert "50.0% are identical on both sides, and 100.0% on side A" in codes()["greedy-answers-differ"].message
    for block, run in enumerate(run for run in results.runs() if "baseline" in run.path.name):
        edit_requests(
            results, run.path.name, lambda record, block=block: with_other_texts(record, f"block {block}")
        )
    assert "greedy-answers-differ" not in codes()


def with_other_texts(request, text="other"):
    if request.index % 2:
        return request
    choices = tuple(msgspec.structs.replace(choice, text=f"{text} {choice.index}") for choice in request.choices)
    return msgspec.structs.replace(request, choices=choices)
