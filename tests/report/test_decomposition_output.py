"""The decomposition of a change, and acceptance of drafts, as people and programs get them."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.cli import document, in_process, printed
from support.results.builders import edit_requests, write_results
from support.results.comparing import assert_exact
from support.results.drafted import profile_of, write_drafted

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.work import NO_PEAKS, NO_SETTINGS, deployment_of, floor_of
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.costs.hardware import hardware_for
from benchctl.errors import UsageError
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord
from benchctl.report.page.page import draw_charts

DECODE = {"num_prefill_tokens": 0, "num_decode_tokens": 1, "context_tokens": 100}
BLOCKS = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))


@pytest.fixture(name="sides", scope="module")
def _sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = write_results(tmp_path_factory.mktemp("decomposition") / "r", block_factors=BLOCKS).path
    return f"{path}:baseline", f"{path}:guided"


def rows_below(text: str, heading: str) -> list[list[str]]:
    """Fields of the lines of the table whose heading holds ``heading``; fields stand two blanks apart."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if heading in line) + 1
    table = lines[start : lines.index("", start)]
    return [[field.strip() for field in line.split("  ") if field.strip()] for line in table]


def test_compare_prints_factors_seconds_and_the_largest_sections(sides: tuple[str, str]) -> None:
    rows = rows_below(printed("compare", *sides, code=1), "where the time went")
    sections = ["lvm_build_pending", "lvm_forward", "lvm_apply_guidance", "remainder"]
    assert [row[0] for row in rows] == ["top_k=5", "steps", "time per step", *sections]
    assert rows[0][1:] == ["wall time", "80.8 ms", "125.5 ms", "x1.554 [1.530, 1.578]", "+44.8 ms"]
    assert rows[2] == ["time per step", "x1.554 [1.530, 1.578]", "+44.8 ms", "100%"]
    assert rows[4] == ["lvm_forward", "0 ms", "4.05 ms", "+4.05 ms [+4.03, +4.07]", "72% of the step"]
    every_row = rows_below(printed("compare", *sides, "--all", code=1), "where the time went")
    assert {row[0] for row in every_row} >= {"value model's FLOPs and bytes", "rest"}
    markdown = printed("compare", *sides, "--markdown", code=1)
    assert "| cell | where the time went | baseline | guided | factor (95% CI) | adds | share |" in markdown
    assert "| &nbsp;&nbsp;time per step |" in markdown


def test_json_adds_up_for_whoever_reads_it(sides: tuple[str, str]) -> None:
    (cell,) = document("compare", *sides, code=1)["cells"]
    found = cell["decomposition"]
    wall = found["wall"]
    assert math.prod(factor["ratio"] for factor in wall["factors"]) == pytest.approx(wall["ratio"])
    assert wall["a_s"] + sum(factor["added_s"] for factor in wall["factors"]) == pytest.approx(wall["b_s"])
    for split in (found["sections"], found["work"]):
        assert sum(part["added_s"] for part in split["parts"]) == pytest.approx(split["whole"]["added_s"])
    assert found["work"]["model"] == "roofline of h100-sxm"
    assert found["sentence"].startswith("time per step carries 100 % of the +55%")


def test_an_experiment_with_natural_lengths_is_divided_exactly(tmp_path: Path) -> None:
    """Guidance that shortens answers and slows steps."""
    path = tmp_path / "r"
    small = ["--set", "workload.num_prompts=4", "--set", "workload.max_tokens=400"]
    printed("simulate", "--profile", "natural", "--blocks", 2, "-q", "-o", path, *small)
    options = CompareOptions(allow_suspect=True, allow=("*",))
    (cell,) = compare_sides(parse_side(f"{path}:baseline"), parse_side(f"{path}:guided"), options).cells
    found = cell.decomposition
    assert found is not None
    assert_exact(found)
    factors = {factor.name: factor.estimate.ratio for factor in found.wall.parts}
    assert list(factors) == ["output tokens", "steps per token", "time per step", "remainder"]
    assert factors["output tokens"] < 1 < factors["time per step"]


def settings_of(engine: dict[str, object]) -> VariantSettings:
    workload = {"dataset": "generated", "num_prompts": 1, "arrival": {"kind": "burst"}}
    profile = {"name": "p", "model": "qwen2.5-7b", "engine": engine, "workload": workload}
    return variant_settings(profile_from_plain(profile | {"variants": {"baseline": {}}}, "test"), "baseline", {})


def test_work_without_shapes_or_peaks_is_unknown_for_a_reason() -> None:
    settings, device = settings_of({"kind": "sim"}), hardware_for("h100-sxm")
    unknown = "the shape of a model is unknown: unknown model 'no-such-model'"
    for of_variant, hardware, reason in (
        (settings.model_copy(update={"model": "no-such-model"}), device, unknown),
        (settings, None, NO_PEAKS),
        (None, device, NO_SETTINGS),
    ):
        with pytest.raises(UsageError, match=re.escape(reason)):
            deployment_of(of_variant, hardware)


def test_devices_that_share_each_layer_count_as_one_with_the_sum_of_their_peaks() -> None:
    engine = {"kind": "vllm", "options": {"tensor_parallel_size": 4}}
    four = deployment_of(settings_of(engine), hardware_for("h100-sxm"))
    step = StepRecord(step=0, start_ns=0, dur_ns=1, clock="host", phase="decode", num_seqs=1, **DECODE)
    of_four, of_one = (floor_of(columns_from([step]), each) for each in (four, replace(four, tensor_parallel=1)))
    assert of_four.hardware == "4 x h100-sxm"
    assert of_four.total_s == pytest.approx(of_one.total_s / 4)


ACCEPTED = ((3, 2, 0, 3, 1, 3), (2, 3, 3, 0, 3, 1), (1, 3, 2, 3, 0, 3))
ARM = "guided top_k=5"


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    return write_drafted(tmp_path_factory.mktemp("drafted") / "r", ACCEPTED).path


def shown(*words):
    code, out, err = in_process(*words)
    assert code in {0, 1, 3}, err
    return out


def test_show_and_compare_tell_acceptance_by_position_and_documents_have_its_counts(path):
    sides = (f"{path}:baseline", f"{path}:guided")
    lines = shown("show", path).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Acceptance of draft tokens"))
    assert lines[start + 1].split("  ")[0] == "cell"
    assert " ".join(lines[start + 2].split()) == f"{ARM} 144 432 288 0.667 3.00 0.833 0.667 (0.800) 0.500 (0.750)"
    text = shown("compare", *sides)
    for words in (
        "0.667 (0.800)",
        "decode steps: 1 to 3 tokens of a sequence per step (x3.000) at 10 to 15.01 ms per step (x1.501)",
        "= passes x0.368 * steps per pass x1.000 * time per step x1.501",
    ):
        assert words in text
    row = "| guided top\\_k=5 | 144 | 432 | 288 | 0.667 | 3.00 | 0.833 | 0.667 (0.800) | 0.500 (0.750) |"
    assert row in shown("compare", *sides, "--markdown")
    cells = json.loads(shown("show", path, "--json"))["cells"]
    (drafts,) = [cell["drafts"] for cell in cells if cell["variant"] == "guided"]
    assert json.loads(shown("compare", *sides, "--json"))["cells"][0]["drafts"] == {"a": None, "b": drafts}
    assert (drafts["drafts"], drafts["draft_tokens"], drafts["accepted_tokens"]) == (144, 432, 288)
    assert [at["accepted"] for at in drafts["positions"]] == [120, 96, 72]


def test_the_factors_of_the_wall_time_multiply_to_it_exactly(path):
    comparison = compare_sides(Side(path, "baseline"), Side(path, "guided"), CompareOptions())
    wall = comparison.cells[0].decomposition.wall
    product = math.prod(factor.estimate.ratio for factor in wall.parts)
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
    assert "Acceptance of draft tokens" not in shown("show", plain)


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
