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
TWO_TO_FOUR = tuple({"top_k": k} for k in (2, 3, 4))
GREEDY = ({"top_k": 1},)


def findings(path):
    return {finding.code: finding for finding in analyze_directory(path).findings}


def findings_of(path, factor_of=lambda _cell, _block: 1.0, **options):
    """Findings of built results; the wall time of each guided run is multiplied by ``factor_of(cell, block)``."""
    for run in builders.write_results(path, **{"block_factors": STEADY, **options}).runs():
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
        builders.rewrite_lines(log, change)
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


def test_a_greedy_path_is_named_as_far_as_the_logs_support_it(tmp_path):
    for name in ("no-requests", "no-is-greedy"):
        findings_of(tmp_path / name, cells=GREEDY, block_factors=STEADY[:1])
    for log in tmp_path.glob("no-requests/runs/*/requests.jsonl"):
        log.unlink()
    assert findings(tmp_path / "no-requests")["greedy-path"].sentence.endswith(
        "all 8 steps of its 1 run were greedy and the value model never ran, so this cell measures no guidance."
    )
    one_candidate = "all 8 steps of its 1 run left one candidate and the value model never ran"
    assert one_candidate in rewrite_steps(tmp_path / "no-is-greedy", without("is_greedy"))["greedy-path"].sentence
    assert "greedy-path" not in rewrite_steps(tmp_path / "no-is-greedy", without("guided_rows"))
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
    cells = [{"top_k": k, "value_scale": 0.0} for k in (2, 3)]
    named = findings_of(tmp_path / "b", lambda *_: 3.0, cells=cells)["unexplained-by-flops"].sentence
    assert named.startswith("guided top_k=2, value_scale=0.0; guided top_k=3, value_scale=0.0: 4.65 times")


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
    one = findings_of(tmp_path / "one", loads_in_warmup=True, block_factors=STEADY[:1])["lazy-load-in-warmup"]
    assert one.sentence.startswith("In 1 run the value model was loaded")
    measured = rewrite_steps(tmp_path / "r", lambda step: step | {"is_warmup": False})
    assert "lazy-load-in-warmup" not in measured
    assert "warm up with a guided request" in measured["lazy-load-measured"].sentence
    for path in tmp_path.glob("r/runs/*/run.json"):
        path.write_text(path.read_text().replace('"done"', '"failed"'))
    assert findings(tmp_path / "r") == {}, "without finished runs"
