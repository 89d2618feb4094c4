"""Findings are said where the data support them, with their numbers, and nowhere else."""

import msgspec
import pytest
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory

STEADY = ({"baseline": 1.0, "guided": 1.0},) * 4
NOISY_BASELINE = tuple(
    {"baseline": base, "guided": guided}
    for base, guided in zip((0.8, 1.0, 1.3, 0.9, 1.1), (1.0, 1.01, 0.99, 1.02, 0.98), strict=True)
)


def findings(path):
    return {finding.code: finding for finding in analyze_directory(path).findings}


def slow_down(results, factor_of):
    """Multiply the wall time of each guided run by ``factor_of(cell, block)``."""
    for run in results.runs():
        record = run.read()
        if record.variant == "guided":
            times = record.times
            wall_ns = (times.last_token_ns - times.first_send_ns) * factor_of(record.cell, record.block)
            moved = msgspec.structs.replace(times, last_token_ns=times.first_send_ns + round(wall_ns))
            run.write(msgspec.structs.replace(record, times=moved))


def test_top_k_one_is_named_the_greedy_path_with_the_flops_that_never_happened(tmp_path):
    builders.write_results(tmp_path, cells=[{"top_k": 1}, {"top_k": 5}], block_factors=STEADY)
    finding = findings(tmp_path)["greedy-path"]
    assert finding.sentence.startswith(
        "guided top_k=1 took the greedy path: all 32 steps of its 4 runs were greedy and the value model never ran"
    )
    assert "published FLOPs rule still charges it" in finding.sentence
    assert finding.numbers["num_steps"] == 32
    assert 0 < finding.numbers["charged_frac"] < 1


def test_a_greedy_cell_without_known_flops_is_named_without_a_charge(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": 1}], block_factors=STEADY[:1])
    for run in results.runs():
        (run.path / "requests.jsonl").unlink()
    sentence = findings(tmp_path)["greedy-path"].sentence
    assert sentence.endswith(
        "all 8 steps of its 1 run were greedy and the value model never ran, so this cell measures no guidance."
    )


def without(results, field):
    for run in results.runs():
        builders.rewrite_lines(run.path / "steps.jsonl", lambda step: {k: v for k, v in step.items() if k != field})


def test_a_log_that_does_not_say_how_rows_were_guided_supports_no_greedy_finding(tmp_path):
    without(builders.write_results(tmp_path, cells=[{"top_k": 1}]), "guided_rows")
    assert "greedy-path" not in findings(tmp_path)


def test_steps_that_do_not_say_whether_they_were_greedy_had_one_candidate_where_requests_left_one(tmp_path):
    without(builders.write_results(tmp_path, cells=[{"top_k": 1}], block_factors=STEADY[:1]), "is_greedy")
    assert "all 8 steps of its 1 run left one candidate and the value model never ran" in (
        findings(tmp_path)["greedy-path"].sentence
    )


def test_steps_that_do_not_say_whether_they_were_greedy_are_no_greedy_path_where_requests_sampled(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": 2}])
    for run in results.runs():
        builders.rewrite_lines(
            run.path / "steps.jsonl",
            lambda step: {k: v for k, v in step.items() if k != "is_greedy"} | {"guided_rows": 0},
        )
    assert "greedy-path" not in findings(tmp_path)


def test_an_overhead_that_does_not_move_with_top_k_is_flat_though_flops_grow(tmp_path):
    builders.write_results(tmp_path, cells=[{"top_k": k} for k in (1, 2, 3, 4, 5)], block_factors=NOISY_BASELINE)
    finding = findings(tmp_path)["flat"]
    assert finding.sentence.startswith(
        "The overhead of guided is flat in top_k from 2 to 5: the wall ratio changes by"
    )
    assert finding.numbers["slope_log_per_unit"] == pytest.approx(0.0, abs=1e-9)
    assert finding.numbers["published_flops_growth_frac"] > 0.15


def test_an_overhead_that_grows_with_the_factor_is_said_to_grow(tmp_path):
    results = builders.write_results(
        tmp_path, cells=[{"top_k": k} for k in (2, 3, 4)], block_factors=NOISY_BASELINE
    )
    slow_down(results, lambda cell, _: 1.2 ** cell["top_k"])
    found = findings(tmp_path)
    assert "flat" not in found
    assert (
        "grows with top_k from 2 to 4: the wall ratio changes by +44.0% [+44.0%, +44.0%] over"
        in found["not-flat"].sentence
    )


def test_an_overhead_that_shrinks_with_the_factor_is_said_to_shrink(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": k} for k in (2, 3, 4)], block_factors=STEADY)
    slow_down(results, lambda cell, _: 1.2 ** -cell["top_k"])
    assert "shrinks with top_k" in findings(tmp_path)["not-flat"].sentence


def test_a_slope_too_uncertain_to_call_gets_no_sentence(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": k} for k in (2, 3, 4)], block_factors=STEADY)
    slow_down(results, lambda cell, block: (1.3, 0.75, 1.2, 0.85)[block] ** cell["top_k"])
    assert not {"flat", "not-flat"} & set(findings(tmp_path))


@pytest.mark.parametrize(
    ("cells", "blocks"),
    [
        ([{"top_k": 2}, {"top_k": 5}], 4),  # two points are always a line
        ([{"top_k": 2}, {"top_k": 3}, {"top_k": 4}], 1),  # one block has no interval
        ([{"value_model": name} for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")], 4),  # no numbers
        ([{"top_k": 2, "value_scale": s} for s in (0.0, 1.0)] + [{"top_k": 3, "value_scale": 0.0}], 4),
        ([{"top_k": 2}, {"top_k": 3}, {"value_scale": 0.0}], 4),
    ],
)
def test_no_trend_is_held_without_three_numbers_of_one_factor_in_two_blocks(tmp_path, cells, blocks):
    builders.write_results(tmp_path, cells=cells, block_factors=STEADY[:blocks])
    assert not {"flat", "not-flat"} & set(findings(tmp_path))


def test_a_slowdown_beyond_its_flops_names_the_share_that_is_not_arithmetic(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": 2}, {"top_k": 5}], block_factors=STEADY)
    slow_down(results, lambda cell, _: 3.0)
    finding = findings(tmp_path)["unexplained-by-flops"]
    assert finding.sentence.startswith(
        "guided top_k=2, 5: 4.65 times the wall time for 1.37 times the observed FLOPs"
    )
    assert finding.numbers["wall_ratio"] == pytest.approx(4.65)
    assert 0.5 < finding.numbers["unexplained_frac"] < 1


def test_the_published_flops_stand_in_where_the_log_counts_no_candidates(tmp_path):
    results = builders.write_results(tmp_path, block_factors=STEADY)
    slow_down(results, lambda cell, _: 3.0)
    for run in results.runs():
        builders.rewrite_lines(
            run.path / "steps.jsonl", lambda step: {k: v for k, v in step.items() if k != "candidates"}
        )
    assert "times the published FLOPs" in findings(tmp_path)["unexplained-by-flops"].sentence


def test_a_slowdown_that_flops_explain_gets_no_sentence(tmp_path):
    results = builders.write_results(tmp_path, block_factors=STEADY)
    slow_down(results, lambda cell, _: 1.2 / 1.55)
    assert "unexplained-by-flops" not in findings(tmp_path)


def test_a_slowdown_within_the_noise_gets_no_sentence(tmp_path):
    noisy = [{"baseline": b, "guided": 1.0} for b in (0.5, 1.5, 3.0)]
    builders.write_results(tmp_path, block_factors=noisy)
    assert "unexplained-by-flops" not in findings(tmp_path)


def test_cells_of_several_factors_are_named_in_full(tmp_path):
    cells = [{"top_k": k, "value_scale": 0.0} for k in (2, 3)]
    slow_down(builders.write_results(tmp_path, cells=cells, block_factors=STEADY), lambda cell, _: 3.0)
    sentence = findings(tmp_path)["unexplained-by-flops"].sentence
    assert sentence.startswith("guided top_k=2, value_scale=0.0; guided top_k=3, value_scale=0.0: 4.65 times")


def test_a_baseline_noisier_than_the_cells_warns_of_single_ratios(tmp_path):
    builders.write_results(tmp_path, block_factors=NOISY_BASELINE)
    finding = findings(tmp_path)["noisy-baseline"]
    assert "a ratio to any single baseline run includes that scatter and misleads" in finding.sentence
    assert finding.numbers["baseline_scatter_frac"] > 0.1
    assert finding.numbers["others_scatter_frac"] < 0.03
    assert finding.numbers["num_blocks"] == 5


@pytest.mark.parametrize(
    "factors",
    [
        STEADY,
        NOISY_BASELINE[:2],  # two blocks do not tell a scatter
        [{"baseline": f, "guided": f} for f in (0.8, 1.0, 1.3)],  # both scatter alike
    ],
)
def test_no_noise_finding_without_blocks_or_a_difference(tmp_path, factors):
    builders.write_results(tmp_path, block_factors=factors)
    assert "noisy-baseline" not in findings(tmp_path)


def test_a_value_model_loaded_in_the_warm_up_is_mentioned(tmp_path):
    builders.write_results(tmp_path, loads_in_warmup=True)
    finding = findings(tmp_path)["lazy-load-in-warmup"]
    assert finding.sentence == (
        "In 3 runs the value model was loaded during the warm-up (2 s): without a warm-up the measured load would "
        "have paid for it."
    )
    assert finding.numbers == {"num_runs": 3.0, "load_s": 2.0}


def test_one_run_is_called_one_run(tmp_path):
    builders.write_results(tmp_path, block_factors=({"baseline": 1.0, "guided": 1.0},), loads_in_warmup=True)
    assert findings(tmp_path)["lazy-load-in-warmup"].sentence.startswith("In 1 run the value model was loaded")


def test_a_value_model_loaded_in_what_was_measured_is_called_out(tmp_path):
    results = builders.write_results(tmp_path, loads_in_warmup=True)
    for run in results.runs():
        builders.rewrite_lines(run.path / "steps.jsonl", lambda step: step | {"is_warmup": False})
    found = findings(tmp_path)
    assert "lazy-load-in-warmup" not in found
    assert "warm up with a guided request" in found["lazy-load-measured"].sentence


def test_an_experiment_without_finished_runs_has_no_findings(tmp_path):
    results = builders.write_results(tmp_path)
    for run in results.runs():
        run.write(msgspec.structs.replace(run.read(), state="failed"))
    assert findings(tmp_path) == {}
