"""Ladders of controls, whose prices add up; the metrics that decide, where servers do not record all of them."""

import math
import shutil

import pytest
from support.cli import printed
from support.results.builders import (
    edit_run,
    run_ids,
    write_results,
)
from support.results.comparing import compare, compare_arms

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.estimate import logarithmic_mean
from benchctl.analysis.compare.answer import reasons_of, verdict_sentence
from benchctl.analysis.compare.looks import take_look
from benchctl.analysis.compare.words import unrecorded_lines
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.pairing import deciding_in_plan
from benchctl.analysis.planning import power_lines
from benchctl.engines.engine import engine_for
from benchctl.profile.load import load_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import StoppingRecord
from benchctl.records.schema import ResultWarning
from benchctl.report.comparison_tables import footnotes_of
from benchctl.report.documents import document_of, summary_document
from benchctl.report.experiment_tables import ladder_table

OVERRIDES = (
    "sweep.value_model=[qwen2.5-0.5b, qwen2.5-1.5b]",
    "workload.num_prompts=2",
    "workload.samples_per_prompt=2",
    "workload.output_len=8",
)


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    """Three blocks of the profile ``controls`` over two value models, in virtual time."""
    path = tmp_path_factory.mktemp("ladder") / "r"
    words = [word for override in OVERRIDES for word in ("--set", override)]
    printed("simulate", "--profile", "controls", "--blocks", 3, "--jobs", 1, *words, "-o", path)
    return path


def test_prices_add_up_to_the_whole_in_every_cell_which_is_what_compare_says_of_its_two_ends(path):
    ladders = analyze_directory(path).ladders
    cells = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms", "wall_s")).cells
    assert [ladder.label for ladder in ladders] == [f"guided {cell.label}" for cell in cells]
    for ladder, cell in zip(ladders, cells, strict=True):
        assert (ladder.num_blocks, len(cell.deciding)) == (3, 2)
        for metric in cell.deciding:
            name, half = metric.metric.name, metric.estimate.half_width * logarithmic_mean(metric.a, metric.b)
            whole, parts = ladder.whole.differences[name], [price.differences[name].mean for price in ladder.prices]
            assert math.isclose(math.fsum(parts), whole.mean, rel_tol=1e-9)
            assert (whole.mean, whole.half_width) == pytest.approx((metric.b - metric.a, half), rel=1e-12)


def test_each_step_is_named_by_what_it_changes_and_stands_in_its_own_cell_table_and_summary(path):
    analysis = analyze_directory(path)
    prices = analysis.ladders[1].prices
    assert [(price.what, price.upper) for price in prices] == [
        ("flags", "guided-flags"),
        ("idle code", "guided-idle value_model=qwen2.5-1.5b"),
        ("sampling + value-model compute", "guided-neutral value_model=qwen2.5-1.5b"),
        ("changed tokens", "guided value_model=qwen2.5-1.5b"),
    ]
    flags, idle, compute, changed = (price.differences["step_ms"].mean for price in prices)
    assert compute > 5 * max(map(abs, (flags, idle, changed)))
    names = [row["what"] for row in ladder_table(analysis).rows]
    assert names == [*(price.what for price in prices), "all of it"] * 2
    labels = [ladder["label"] for ladder in summary_document(analysis)["ladders"]]
    assert labels == [ladder.label for ladder in analysis.ladders]


def test_a_block_with_an_unusable_step_takes_no_part(path, tmp_path):
    results = ResultDirectory(shutil.copytree(path, tmp_path / "r"))
    flags = next(run.path.name for run in results.runs() if run.path.name.endswith("b1-guided-flags"))
    edit_run(results, flags, state="suspect")
    ladders = analyze_directory(results.path).ladders
    assert [ladder.num_blocks for ladder in ladders] == [2, 2]
    assert ladders[0].whole.differences["wall_s"].half_width is None


ALL = ["step_ms", "tpot_ms", "wall_s"]


def equal_servers(path):
    """Two arms whose times differ by nothing but scatter."""
    factors = [{"baseline": 1.0, "guided": math.exp(e)} for e in (0.001, -0.001, 0.002, -0.002, 0.001, 0.0)]
    return write_results(path, block_factors=factors, cells=({"top_k": 1},))


def lose_steps(results, *variants, code="steps-unknown", most=99):
    """Leave no step of at most ``most`` runs of each variant, and say why."""
    for variant in variants:
        for run_id in run_ids(results, variant)[:most]:
            (results.run(run_id).path / "steps.jsonl").unlink()
            edit_run(results, run_id, warnings=(ResultWarning(code=code, message="no steps"),))


def compared(results, *metrics, primary=None):
    """The comparison, and the names of the metrics that decide it."""
    if primary is not None:
        results.write_profile(f"{results.profile_yaml()}primary_metrics: {primary}\n")
    comparison = compare_arms(results, metrics=metrics)
    return comparison, [metric.metric.name for metric in comparison.cells[0].deciding]


@pytest.mark.parametrize("variants", [("baseline", "guided"), ("baseline",), ("guided",)])
def test_a_metric_that_a_server_never_records_decides_nothing_and_the_verdict_names_it(tmp_path, variants):
    results = equal_servers(tmp_path / "r")
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding, unrecorded_lines(comparison)) == ("equivalent", ALL, ())
    lose_steps(results, *variants)
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding, comparison.num_tests) == ("equivalent", ["tpot_ms", "wall_s"], 2)
    line = "step_ms is not recorded by this server; tpot_ms and wall_s decide"
    assert unrecorded_lines(comparison) == (line,)
    assert line in list(footnotes_of(comparison))
    assert list(document_of(comparison)["cells"][0]["unrecorded_metrics"]) == ["step_ms"]
    without, _ = compared(results, primary="[tpot_ms, wall_s]")
    levels = [[m.judged_confidence for m in each.cells[0].deciding] for each in (comparison, without)]
    assert levels[0] == levels[1], "as if the profile did not list it"


@pytest.mark.parametrize(("most", "code"), [(1, "steps-unknown"), (99, "steps-missing")])
def test_a_metric_that_should_be_there_and_is_missing_leaves_no_verdict_of_equivalence(tmp_path, most, code):
    results = equal_servers(tmp_path)
    lose_steps(results, "guided", code=code, most=most)
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding) == ("inconclusive", ALL)


def test_a_metric_that_is_named_stays_and_where_no_primary_one_is_recorded_that_is_the_reason(tmp_path):
    results = equal_servers(tmp_path)
    lose_steps(results, "baseline", "guided")
    comparison, deciding = compared(results, "step_ms", "wall_s")
    assert (comparison.verdict, deciding) == ("inconclusive", ["step_ms", "wall_s"])
    assert reasons_of(comparison) == ("top_k=1: step_ms ? unknown: needs a step log",)
    comparison, _ = compared(results, primary="[step_ms, p95_step_ms]")
    assert verdict_sentence(comparison) == (
        "inconclusive: guided against baseline (simulated): nothing to judge: step_ms and p95_step_ms are not "
        "recorded by this server, and no other primary metric is left; name one with --metrics, such as wall_s"
    )


@pytest.mark.parametrize(
    ("variants", "lost", "is_precise", "widths"),
    [
        (["guided"], {"most": 1}, False, {"step_ms": False, "tpot_ms": True, "wall_s": True}),
        (["baseline", "guided"], {}, True, {"tpot_ms": True, "wall_s": True}),
        (
            ["baseline", "guided"], {"code": "steps-missing"}, False,
            {"step_ms": False, "tpot_ms": True, "wall_s": True},
        ),
    ],
)  # fmt: skip
def test_a_look_waits_for_the_metrics_that_decide_and_for_no_other(tmp_path, variants, lost, is_precise, widths):
    results = equal_servers(tmp_path)
    lose_steps(results, *variants, **lost)
    rule = StoppingRecord(precision_frac=0.02, confidence=0.9875, look_blocks=(6, 8, 10, 12))
    look = take_look(load_experiment(results.path), rule, 6, ALL)
    assert {width.metric: width.half_width_frac is not None for width in look.half_widths} == widths
    assert look.is_precise is is_precise


def test_a_plan_corrects_for_the_metrics_that_will_decide():
    profile = load_profile("aa", engine="attach", overrides=["engine.options.url=http://host:1"], blocks=8)
    has_steps = engine_for("attach").has_steps
    deciding = deciding_in_plan(profile.primary_metrics, profile, has_steps)
    assert set(profile.primary_metrics) - set(deciding) == {"step_ms"}
    power, assumed = power_lines(profile, None, has_steps), power_lines(profile, None)
    for (line, *_), num_tests in ((power, 2), (assumed, 3)):
        assert f"corrected for {num_tests} tests" in line
    assert power[-1] == "step_ms is not recorded by this server; tpot_ms and wall_s decide"
