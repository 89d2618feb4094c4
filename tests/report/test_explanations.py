"""Causes in a report: findings where data support them, the decomposition of a change, accepted drafts."""

import math
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.cli import document, printed
from support.results.builders import change_requests, rewrite_lines, run_ids, write_results
from support.results.comparing import assert_exact, compare_arms
from support.results.planted import profile_of, write_drafted

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.work import NO_PEAKS, NO_SETTINGS, deployment_of, floor_of
from benchctl.costs.hardware import hardware_for
from benchctl.errors import UsageError
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import columns_from
from benchctl.records.directory import ResultDirectory
from benchctl.records.schema import StepRecord
from benchctl.report.page.page import draw_charts

STEADY = ({"baseline": 1.0, "guided": 1.0},) * 4
NOISY_BASELINE = tuple(
    {"baseline": base, "guided": guided}
    for base, guided in zip((0.8, 1.0, 1.3, 0.9, 1.1), (1.0, 1.01, 0.99, 1.02, 0.98), strict=True)
)
TWO_TO_FOUR = tuple({"top_k": k} for k in (2, 3, 4))


def findings(path):
    return {finding.code: finding for finding in analyze_directory(path).findings}


def findings_of(path, factor_of=lambda _cell, _block: 1.0, **options):
    """Findings of built results; the wall time of each guided run is multiplied by ``factor_of(cell, block)``."""
    for run in write_results(path, **{"block_factors": STEADY, **options}).runs():
        record = run.read()
        if record.variant == "guided":
            times = record.times
            wall_ns = (times.last_token_ns - times.first_send_ns) * factor_of(record.cell, record.block)
            moved = msgspec.structs.replace(times, last_token_ns=times.first_send_ns + round(wall_ns))
            run.write(msgspec.structs.replace(record, times=moved))
    return findings(path)


def rewrite_steps(path, change):
    """Findings once each step of every run is what ``change`` makes of it."""
    for log in path.glob("runs/*/steps.jsonl"):
        rewrite_lines(log, change)
    return findings(path)


def without(field):
    return lambda step: {name: value for name, value in step.items() if name != field}


def test_top_k_one_is_named_the_greedy_path_with_the_flops_that_never_happened(tmp_path):
    finding = findings_of(tmp_path, cells=[{"top_k": 1}, {"top_k": 5}])["greedy-path"]
    assert finding.sentence.startswith(
        "guided top_k=1 took the greedy path: all 32 steps of its 4 runs were greedy and the value model never ran"
    )
    assert "published FLOPs rule still charges it" in finding.sentence
    assert finding.numbers["num_steps"] == 32
    assert 0 < finding.numbers["charged_frac"] < 1
    one_candidate = "guided top_k=1 took the greedy path: all 32 steps of its 4 runs left one candidate and"
    assert rewrite_steps(tmp_path, without("is_greedy"))["greedy-path"].sentence.startswith(one_candidate)
    assert "greedy-path" not in rewrite_steps(tmp_path, without("guided_rows"))
    findings_of(tmp_path / "sampled", cells=[{"top_k": 2}])
    unsaid = rewrite_steps(tmp_path / "sampled", lambda step: without("is_greedy")(step) | {"guided_rows": 0})
    assert "greedy-path" not in unsaid


def test_an_overhead_is_said_to_be_flat_to_grow_or_to_shrink_with_a_factor(tmp_path):
    cells = [{"top_k": k} for k in (1, 2, 3, 4, 5)]
    flat = findings_of(tmp_path / "flat", cells=cells, block_factors=NOISY_BASELINE)["flat"]
    assert flat.sentence.startswith(
        "The overhead of guided is flat in top_k from 2 to 5: the wall ratio changes by"
    )
    assert flat.numbers["slope_log_per_unit"] == pytest.approx(0.0, abs=1e-9)
    assert flat.numbers["published_flops_growth_frac"] > 0.15
    sloped = {"cells": TWO_TO_FOUR, "block_factors": NOISY_BASELINE}
    grown = findings_of(tmp_path / "grown", lambda cell, _: 1.2 ** cell["top_k"], **sloped)
    change = "grows with top_k from 2 to 4: the wall ratio changes by +44.0% [+44.0%, +44.0%] over"
    assert "flat" not in grown
    assert change in grown["not-flat"].sentence
    shrunk = findings_of(tmp_path / "shrunk", lambda cell, _: 1.2 ** -cell["top_k"], cells=TWO_TO_FOUR)
    assert "shrinks with top_k" in shrunk["not-flat"].sentence


def test_no_trend_is_held_of_an_uncertain_slope_or_without_three_numbers_of_one_factor_in_two_blocks(tmp_path):
    unsteady = findings_of(
        tmp_path / "unsteady", lambda cell, block: (1.3, 0.75, 1.2, 0.85)[block] ** cell["top_k"], cells=TWO_TO_FOUR
    )
    assert not {"flat", "not-flat"} & set(unsteady)
    for number, (cells, blocks) in enumerate(
        (
            ([{"top_k": 2}, {"top_k": 5}], 4),  # two points are always a line
            (TWO_TO_FOUR, 1),  # one block has no interval
            ([{"value_model": name} for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")], 4),  # no numbers
            ([{"top_k": 2, "value_scale": s} for s in (0.0, 1.0)] + [{"top_k": 3, "value_scale": 0.0}], 4),
            ([{"top_k": 2}, {"top_k": 3}, {"value_scale": 0.0}], 4),
        )
    ):
        found = findings_of(tmp_path / f"{number}", cells=cells, block_factors=STEADY[:blocks])
        assert not {"flat", "not-flat"} & set(found), cells


def test_a_slowdown_beyond_its_flops_names_the_share_that_is_not_arithmetic(tmp_path):
    finding = findings_of(tmp_path / "a", lambda *_: 3.0, cells=[{"top_k": 2}, {"top_k": 5}])[
        "unexplained-by-flops"
    ]
    assert finding.sentence.startswith(
        "guided top_k=2, 5: 4.65 times the wall time for 1.37 times the observed FLOPs"
    )
    assert finding.numbers["wall_ratio"] == pytest.approx(4.65)
    assert 0.5 < finding.numbers["unexplained_frac"] < 1
    unlogged = rewrite_steps(tmp_path / "a", without("candidates"))["unexplained-by-flops"]
    assert "times the published FLOPs" in unlogged.sentence


def test_a_slowdown_that_flops_explain_or_within_the_noise_gets_no_sentence(tmp_path):
    assert "unexplained-by-flops" not in findings_of(tmp_path / "explained", lambda *_: 1.2 / 1.55)
    noisy = [{"baseline": b, "guided": 1.0} for b in (0.5, 1.5, 3.0)]
    assert "unexplained-by-flops" not in findings_of(tmp_path / "noisy", block_factors=noisy)


def test_a_baseline_noisier_than_the_cells_warns_of_single_ratios(tmp_path):
    finding = findings_of(tmp_path / "noisy", block_factors=NOISY_BASELINE)["noisy-baseline"]
    assert "a ratio to any single baseline run includes that scatter and misleads" in finding.sentence
    assert finding.numbers["others_scatter_frac"] < 0.03
    assert finding.numbers["baseline_scatter_frac"] > 0.1
    assert finding.numbers["num_blocks"] == 5
    both_scatter = [{"baseline": f, "guided": f} for f in (0.8, 1.0, 1.3)]
    for number, factors in enumerate((STEADY, NOISY_BASELINE[:2], both_scatter)):  # two blocks tell no scatter
        assert "noisy-baseline" not in findings_of(tmp_path / f"{number}", block_factors=factors)


def test_a_value_model_loaded_in_the_warm_up_is_mentioned_and_one_in_what_was_measured_called_out(tmp_path):
    finding = findings_of(tmp_path / "r", loads_in_warmup=True, block_factors=STEADY[:3])["lazy-load-in-warmup"]
    assert finding.sentence == (
        "In 3 runs the value model was loaded during the warm-up (2 s): without a warm-up the measured load would "
        "have paid for it."
    )
    assert finding.numbers == {"num_runs": 3.0, "load_s": 2.0}
    measured = rewrite_steps(tmp_path / "r", lambda step: step | {"is_warmup": False})
    assert "lazy-load-in-warmup" not in measured
    assert "warm up with a guided request" in measured["lazy-load-measured"].sentence
    for path in tmp_path.glob("r/runs/*/run.json"):
        path.write_text(path.read_text().replace('"done"', '"failed"'))
    assert findings(tmp_path / "r") == {}, "without finished runs"


DECODE = {"num_prefill_tokens": 0, "num_decode_tokens": 1, "context_tokens": 100}
VARYING = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))


@pytest.fixture(name="sides", scope="module")
def _sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = write_results(tmp_path_factory.mktemp("decomposition") / "r", block_factors=VARYING).path
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
    markdown = printed("compare", *sides, "--markdown", code=1)
    assert "| cell | where the time went | baseline | guided | factor (95% CI) | adds | share |" in markdown


def test_json_adds_up_for_anyone_who_reads_it(sides: tuple[str, str]) -> None:
    (cell,) = document("compare", *sides, code=1)["cells"]
    parts = cell["decomposition"]
    wall = parts["wall"]
    assert math.prod(factor["ratio"] for factor in wall["factors"]) == pytest.approx(wall["ratio"])
    assert wall["a_s"] + sum(factor["added_s"] for factor in wall["factors"]) == pytest.approx(wall["b_s"])
    for split in (parts["sections"], parts["work"]):
        assert sum(part["added_s"] for part in split["parts"]) == pytest.approx(split["whole"]["added_s"])
    assert parts["work"]["model"] == "roofline of h100-sxm"
    assert parts["sentence"].startswith("wall time +55%: a step takes 15.7 ms instead of 10.1 ms")


def test_an_experiment_with_natural_lengths_is_divided_exactly(tmp_path: Path) -> None:
    """Guidance that shortens answers and slows steps."""
    path = tmp_path / "r"
    small = ["--set", "workload.num_prompts=4", "--set", "workload.max_tokens=400"]
    printed("simulate", "--profile", "natural", "--blocks", 2, "-q", "-o", path, *small)
    (cell,) = compare_arms(ResultDirectory(path), allow_suspect=True, allow=("*",)).cells
    assert_exact(cell.decomposition)
    factors = {factor.name: factor.estimate.ratio for factor in cell.decomposition.wall.parts}
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


@pytest.fixture(name="drafted", scope="module")
def _drafted(tmp_path_factory):
    return write_drafted(tmp_path_factory.mktemp("drafted") / "r", ACCEPTED)


def test_show_and_compare_tell_acceptance_by_position_and_documents_have_its_counts(drafted):
    sides = (f"{drafted.path}:baseline", f"{drafted.path}:guided")
    row = rows_below(printed("show", drafted.path), "Acceptance of draft tokens")[1]
    assert row == [ARM, *["144", "432", "288", "0.667", "3.00", "0.833"], "0.667 (0.800)", "0.500 (0.750)"]
    text = printed("compare", *sides, code=3)
    for words in (
        "0.667 (0.800)",
        "decode steps: 1 to 3 tokens of a sequence per step (x3.000) at 10 to 15.01 ms per step (x1.501)",
        "a sequence gains 3 tokens in a step instead of 1 and a step takes ",
    ):
        assert words in text
    row = "| guided top\\_k=5 | 144 | 432 | 288 | 0.667 | 3.00 | 0.833 | 0.667 (0.800) | 0.500 (0.750) |"
    assert row in printed("compare", *sides, "--markdown", code=3)
    cells = document("show", drafted.path)["cells"]
    (drafts,) = [cell["drafts"] for cell in cells if cell["variant"] == "guided"]
    assert document("compare", *sides, code=3)["cells"][0]["drafts"] == {"a": None, "b": drafts}
    assert (drafts["drafts"], drafts["draft_tokens"], drafts["accepted_tokens"]) == (144, 432, 288)
    assert [at["accepted"] for at in drafts["positions"]] == [120, 96, 72]
    decomposition = compare_arms(drafted).cells[0].decomposition
    assert_exact(decomposition)
    assert decomposition.model is not None  # several tokens per row do not stop the explanation


def test_a_chart_shows_both_kinds_of_acceptance_and_is_left_out_without_drafts(drafted, sides):
    charts = {chart.id: chart for chart in draw_charts(analyze_directory(drafted.path))}
    rows = charts["acceptance"].spec["datasets"]["rows"]
    accepted = {(0, 1): 15 / 18, (0, 2): 12 / 18, (0, 3): 9 / 18, (1, 1): 15 / 18, (1, 2): 12 / 15, (1, 3): 9 / 12}
    assert {(row["panel"], row["position"]): row["share"] for row in rows} == pytest.approx(accepted, rel=1e-5)
    plain = sides[0].removesuffix(":baseline")
    assert "acceptance" not in {chart.id for chart in draw_charts(analyze_directory(Path(plain)))}
    assert "Acceptance of draft tokens" not in printed("show", plain)


def test_greedy_answers_that_drafts_change_are_a_warning_unless_they_change_by_themselves(tmp_path):
    results = write_drafted(tmp_path / "r", ACCEPTED, num_requests=40)
    results.write_profile(profile_of(3, more="sampling: {temperature: 0.0}\n"))

    def with_other_texts(variant, text):
        """Every second answer of the runs of a variant."""
        for run_id in run_ids(results, variant):
            choices = next(results.run(run_id).requests()).choices
            others = tuple(msgspec.structs.replace(each, text=text.format(run_id)) for each in choices)
            change_requests(results, run_id, *range(0, 40, 2), choices=others)
        return {warning.code: warning.message for warning in compare_arms(results).warnings}

    said = with_other_texts("guided", "other")["greedy-answers-differ"]
    assert "50.0% are identical on both sides, and 100.0% on side A" in said
    assert "greedy-answers-differ" not in with_other_texts("baseline", "other")
    assert "greedy-answers-differ" not in with_other_texts("baseline", "of {}")
