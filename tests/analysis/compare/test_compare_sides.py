"""Which runs stand against which, and the verdict over them; results of other tools, and one side of each."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.cli import in_process
from support.results.builders import (
    BASELINE,
    change_requests,
    edit_manifest,
    edit_run,
    set_positions,
    write_results,
)
from support.results.comparing import compare, compare_arms, messages, metric_of

from benchctl.analysis.compare.answer import (
    answer_lines,
    cell_sentence,
    open_reasons,
    reasons_of,
    verdict_sentence,
)
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.noise_words import noise_sentence
from benchctl.analysis.compare.result import blocks_to_settle
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.analysis.foreign import compare_foreign, runs_of_side
from benchctl.errors import NotComparableError, UsageError
from benchctl.interop.foreign_readers import is_foreign
from benchctl.records.record import RequestError
from benchctl.records.schema import HostInfo, HostSample
from benchctl.records.stores import MetricNoise
from benchctl.report.comparison_tables import footnotes_of

TRUTH = 15.5 / 10
TWO_CELLS = ({"top_k": 2}, {"top_k": 5})


def factors(num_blocks=6, guided=1.0, noise=0.002, drift=0.1, seed=1):
    """Block factors that shake both variants together by ``drift`` and each alone by ``noise``."""
    stream = np.random.default_rng(seed)
    blocks, a, b = (np.exp(stream.normal(0, sd, num_blocks)) for sd in (drift, noise, noise))
    return [{"baseline": x, "guided": y} for x, y in zip(blocks * a, blocks * b * guided, strict=True)]


def built(path, *numbers, cells=({"top_k": 5},), output_tokens=8, **shaken):
    """Results whose blocks are those of ``factors``."""
    return write_results(path, block_factors=factors(*numbers, **shaken), cells=cells, output_tokens=output_tokens)


@pytest.fixture(name="results", scope="module")
def _results(tmp_path_factory):
    return built(tmp_path_factory.mktemp("sides") / "r")


@pytest.fixture(name="path")
def _path(results):
    return results.path


def test_a_side_is_a_directory_or_a_variant_of_one(tmp_path):
    with_colon, longer_than_a_name = tmp_path / "2026-01-01T10:00", "x" * 300
    with_colon.mkdir()
    assert str(parse_side("results/x:guided")) == "results/x:guided"
    for text, side in (
        ("results/x", Side(Path("results/x"), None)),
        ("results/x:guided", Side(Path("results/x"), "guided")),
        (f"{with_colon}", Side(with_colon, None)),
        (f"{with_colon}:baseline", Side(with_colon, "baseline")),
        (f"{tmp_path}:{longer_than_a_name}", Side(tmp_path, longer_than_a_name)),
    ):
        assert (parse_side(text), is_foreign(text)) == (side, False)
    for text in (":guided", "results/x:"):
        with pytest.raises(UsageError, match="write DIR or DIR:variant"):
            parse_side(text)


def with_neighbours(results, cores):
    """Let programs beside server and client use that many of 2 cores, on the host that measured."""
    edit_manifest(results, host=HostInfo(hostname="here", platform="Linux", python="3.12", num_cores=2))
    for run in results.runs():
        edit_run(results, run.read().run_id, host="here")
        t_ns = run.read().times.last_token_ns
        with run.append("host") as host:
            busy = {"server_cpu_cores": 0.2, "client_cpu_cores": 0.1, "host_cpu_frac": (cores + 0.3) / 2}
            host.write(HostSample(t_ns=t_ns, **busy))
    return results


def noise_of_measured(results, **options):
    """The sentence, as of an engine that measures time."""
    return noise_sentence(replace(compare_arms(results, **options), is_simulated=False))


def test_noise_is_said_in_one_sentence_where_it_prevents_the_verdict(tmp_path, results):
    noisy = with_neighbours(built(tmp_path / "noisy", noise=0.5, drift=0.0), 1.6)
    sentence = noise_of_measured(noisy)
    assert sentence is not None
    scatter = max(m.scatters[0] for m in compare_arms(noisy).cells[0].deciding)
    assert sentence.startswith("This machine was noisy: ")
    assert sentence.endswith(
        f" of baseline varied by {scatter:.0%} between blocks (other processes used 1.6 of 2 cores)"
    )
    assert sentence in answer_lines(replace(compare_arms(noisy), is_simulated=False))
    assert noise_sentence(compare_arms(noisy)) is None, "the scatter of a simulator is that of its cost model"
    assert noise_of_measured(results) is None, "of a regression"
    for case, *shaken in (("shared by both sides", 6, 1 / TRUTH, 0.02, 0.5), ("small", 6, 1 / TRUTH, 0.02, 0.0)):
        quiet = built(tmp_path / case, *shaken)
        assert (compare_arms(quiet).verdict, noise_of_measured(quiet)) == ("inconclusive", None), case
    assert noise_of_measured(built(tmp_path / "two", 2, 1 / TRUTH, 0.5, 0.0)).endswith("between blocks")


def test_guided_against_baseline_is_a_regression_of_the_known_size(results):
    comparison = compare_arms(results)
    assert (comparison.verdict, comparison.exit_code) == ("regression", 1)
    assert (comparison.pairing, comparison.num_tests, comparison.cells[0].num_a_first) == ("interleaved", 3, 6)
    step = metric_of(comparison, "step_ms")
    assert step.estimate.ratio == pytest.approx(TRUTH, rel=0.003)
    assert step.estimate.ci_low < TRUTH < step.estimate.ci_high
    assert step.estimate.half_width < 0.005, "pairing cancels what blocks have in common"
    assert step.b / step.a == pytest.approx(step.estimate.ratio, rel=1e-4)
    assert step.estimate.p_value < 1e-9
    sentence = "regression: guided against baseline (simulated): 3 of 3 comparisons worse"
    assert verdict_sentence(comparison).startswith(sentence)
    assert len(reasons_of(comparison)) == 3
    for name, role, verdict, reason in (
        ("preemptions", "exploratory", "equal", None),  # the same zero on both sides
        ("candidates_per_token", "exploratory", "inconclusive", "a value of zero has no ratio"),
        ("output_tokens", "exact", "equal", None),
    ):
        metric = metric_of(comparison, name)
        assert (metric.role, metric.verdict, metric.reason) == (role, verdict, reason), name
    assert compare_arms(results, margin_frac=0.6).verdict == "equivalent"


def test_swapping_the_sides_is_an_improvement_of_the_inverse_ratio_and_throughput_is_better_when_higher(path):
    forth, back = compare(f"{path}:baseline", f"{path}:guided"), compare(f"{path}:guided", f"{path}:baseline")
    assert (back.verdict, back.exit_code) == ("improvement", 0)
    ratios = [metric_of(each, "wall_s").estimate.ratio for each in (forth, back)]
    assert ratios[0] * ratios[1] == pytest.approx(1)
    faster = compare(f"{path}:guided", f"{path}:baseline", metrics=("output_throughput",))
    assert (faster.verdict, metric_of(faster, "output_throughput").estimate.ratio > 1) == ("improvement", True)


def test_equal_variants_are_equivalent_only_when_the_noise_is_small(tmp_path):
    quiet = compare_arms(built(tmp_path / "quiet", guided=1 / TRUTH, noise=0.0005))
    assert (quiet.verdict, quiet.exit_code) == ("equivalent", 0)
    noisy = compare_arms(built(tmp_path / "noisy", guided=1 / TRUTH, noise=0.02, seed=2))
    assert (noisy.verdict, noisy.exit_code) == ("inconclusive", 3)
    assert verdict_sentence(noisy).startswith("inconclusive")
    needed = blocks_to_settle([noisy])
    assert needed > 6
    number = f"about {needed} blocks in all would settle it"
    assert number in "\n".join(answer_lines(noisy))
    assert number in cell_sentence(noisy.cells[0], 1)
    assert not any("block" in reason for reason in (*reasons_of(noisy), *open_reasons(noisy))), "one count"
    (cell,) = noisy.cells
    never = tuple(replace(m, unreliable="in bursts") if m.metric.name == "tpot_ms" else m for m in cell.metrics)
    assert blocks_to_settle([replace(noisy, cells=(replace(cell, metrics=never),))]) is None, "one stays open"


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_fewer_than_six_blocks_are_a_screening_without_a_verdict_however_clear_the_change(tmp_path, num_blocks):
    comparison = compare_arms(built(tmp_path, num_blocks, noise=1e-4, drift=0))
    assert (comparison.verdict, comparison.exit_code, comparison.is_screening) == ("inconclusive", 3, True)
    if num_blocks == 1:
        assert "screening: 1 block gives no verdict; at least 6 are needed" in reasons_of(comparison)[0]
        return
    low = metric_of(comparison, "step_ms").estimate.ci_low
    if num_blocks == 2:
        assert low is None
        assert "[unknown with 2 blocks]" in verdict_sentence(comparison)
    else:
        assert low > 1.2
    words = f"a screening of {num_blocks} blocks gives no verdict; its largest change is"
    assert words in verdict_sentence(comparison)
    assert {m.verdict for m in comparison.cells[0].metrics if m.a_blocks != m.b_blocks} <= {
        "inconclusive",
        "unknown",
    }


def test_each_guided_cell_meets_the_baseline_of_its_blocks(tmp_path, path):
    swept = built(tmp_path, 3, cells=TWO_CELLS)
    comparison, back = compare_arms(swept), compare(f"{swept.path}:guided", f"{swept.path}:baseline")
    labels = [(cell.label, cell.a_label) for cell in comparison.cells]
    assert labels == [("top_k=2", "baseline"), ("top_k=5", "baseline")]
    assert comparison.num_tests == 6
    assert [cell.label for cell in back.cells] == ["top_k=2", "top_k=5"]
    assert [c.a_label for c in compare(f"{path}:guided", f"{path}:baseline").cells] == ["guided top_k=5"]


def test_a_regression_in_one_cell_outweighs_the_others(tmp_path):
    both = built(tmp_path / "r", noise=1e-5, drift=0, cells=TWO_CELLS)
    slow = built(tmp_path / "s", guided=1.1, noise=1e-5, drift=0)
    comparison = compare(both.path, slow.path)
    verdicts = {cell.label: cell.verdict for cell in comparison.cells}
    assert verdicts == {"baseline": "equivalent", "guided top_k=5": "regression"}
    assert comparison.verdict == "regression"
    assert any("guided top_k=2" in message for message in messages(comparison, "unmatched"))


def test_two_directories_are_paired_where_they_have_one_plan_and_not_where_they_share_no_blocks(tmp_path, path):
    later, other = built(tmp_path / "later", seed=4), built(tmp_path / "other", 4, seed=5)
    edit_manifest(later, created_at="2026-02-01T00:00:00Z")
    labels = [("baseline", "baseline"), ("guided top_k=5", "guided top_k=5")]
    for a, b, pairing, codes, cells in (
        (path, later.path, "same-plan", {"not-interleaved"}, labels),
        (path, f"{later.path}:guided", "same-plan", {"not-interleaved"}, labels[1:]),
        (f"{path}:baseline", f"{other.path}:guided", "unpaired", {"unpaired"}, [("baseline", "guided top_k=5")]),
        (path, path, "interleaved", {"same-runs", "no-scatter"}, labels),
    ):
        comparison = compare(a, b)
        assert comparison.pairing == pairing
        assert codes <= {warning.code for warning in comparison.warnings}
        assert [(cell.a_label, cell.b_label) for cell in comparison.cells] == cells
    assert comparison.verdict == "equivalent"
    kinds = [line.partition(":")[0] for line in footnotes_of(comparison)][-2:]
    assert kinds == ["warning", "note"], "what limits the verdict comes first"


def test_tests_that_say_nearly_the_same_are_judged_nearly_as_one(tmp_path):
    results = built(tmp_path, guided=1.025 / TRUTH, noise=0.012, seed=44)
    alone = compare_arms(results, metrics=("step_ms",))
    among = compare_arms(results, metrics=("step_ms", "p50_step_ms", "wall_s", "tpot_ms", "e2el_ms"))
    assert alone.verdict == among.verdict == "regression"
    single, tested = (metric_of(comparison, "step_ms") for comparison in (alone, among))
    assert tested.estimate.log_interval == single.estimate.log_interval
    assert single.judged_confidence == pytest.approx(0.95)
    assert 0.95 <= tested.judged_confidence < 0.97
    (cell,) = among.cells
    strict = tuple(replace(m, judged_confidence=0.999) if m.metric.name != "wall_s" else m for m in cell.metrics)
    mixed = replace(among, cells=(replace(cell, metrics=strict),))
    assert (mixed.verdict, blocks_to_settle([mixed])) == ("regression", None), "one metric that decides is enough"
    step = metric_of(mixed, "step_ms")
    assert step.verdict == "inconclusive"
    assert "the 95% interval is clear of the margin of 1%, but not that of 99.9%" in step.reason


def test_a_change_is_called_beyond_the_noise_floor_of_the_machine_and_none_is_called_equivalent_inside_it(results):
    noise = {"step_ms": MetricNoise(log_sd=0.2, num_blocks=8, floor_frac=0.6)}
    comparison = compare_arms(results, noise=noise, metrics=("step_ms", "wall_s"))
    verdicts = [(m.verdict, m.margins.change_frac) for m in comparison.cells[0].deciding]
    assert (verdicts, comparison.noise) == ([("inconclusive", 0.6), ("regression", 0.01)], noise)
    assert compare_arms(results, noise=noise, margin_frac=0.7).verdict == "equivalent"


def test_a_block_that_stands_out_counts_and_is_told(tmp_path):
    shaken = factors(8, noise=0.001, drift=0)
    shaken[5]["guided"] *= 1.2
    results = write_results(tmp_path, block_factors=shaken)
    for estimator, weight in (("robust", "counts little"), ("mean", "counts in full")):
        comparison = compare_arms(results, metrics=("step_ms",), estimator=estimator)
        step = metric_of(comparison, "step_ms")
        assert (step.outlier_blocks, step.estimate.num_blocks, step.without_outliers.num_blocks) == ((5,), 8, 7)
        (message,) = messages(comparison, "outlier-block")
        assert message.startswith(f"block 5 stands out and {weight}; without it the change would be +5")


def test_metrics_that_were_not_recorded_or_are_exact_leave_the_verdict_open(results):
    energy = compare_arms(results, metrics=("gpu_energy_j",))
    assert (metric_of(energy, "gpu_energy_j").verdict, energy.verdict) == ("unknown", "inconclusive")
    assert "needs GPU samples" in reasons_of(energy)[0]
    assert "nothing to judge" in verdict_sentence(compare_arms(results, metrics=("num_completed",)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ("step_sm",)}, "no metric is called 'step_sm'; did you mean 'step_ms'"),
        ({"metrics": ("qqqq",)}, "metrics are wall_s, "),
        ({"metrics": ("mean_batch_size",)}, "mean_batch_size cannot decide a comparison"),
        ({"margin_frac": 1.0}, "threshold is 1"),
        ({"margin_frac": -0.1}, "-0.1"),
        ({"confidence": 1.0}, "confidence is 1"),
    ],
)
def test_a_metric_that_cannot_decide_and_options_outside_their_range_are_refused(results, options, words):
    with pytest.raises(UsageError, match=words):
        compare_arms(results, **options)


def test_sides_that_are_not_there_or_share_no_cell_are_refused(tmp_path, path):
    with pytest.raises(UsageError, match="has no variant 'guide'; it has baseline, guided"):
        compare(f"{path}:baseline", f"{path}:guide")
    other = built(tmp_path, cells=({"top_k": 3},)).path
    with pytest.raises(NotComparableError, match="share no cell: guided top_k=5 against guided top_k=3"):
        compare(f"{path}:guided", f"{other}:guided")


def test_a_run_that_ran_second_in_its_block_is_counted(tmp_path):
    results = built(tmp_path, 2)
    set_positions(results, {"002-b1-baseline": 1, "003-b1-guided-top_k5": 0})
    assert compare_arms(results).cells[0].num_a_first == 1


WRITTEN = Path(__file__).parents[2] / "interop" / "foreign"
VLLM = json.loads((WRITTEN / "vllm-0.json").read_text())
LATENCIES = ("ttft", "tpot", "itl", "e2el")


def repeats(directory, factor=1.0, count=4, *, seed=1, **changes):
    """Repeats of one load; latencies are ``factor`` times the written ones, give or take a part in a thousand."""
    directory.mkdir(parents=True, exist_ok=True)
    noise = random.Random(seed)
    for index in range(count):
        here = factor * (1 + 0.001 * noise.uniform(-1, 1))
        scaled = {key: VLLM[key] * here for key in ("duration", *(f"mean_{name}_ms" for name in LATENCIES))}
        rates = {key: VLLM[key] / here for key in ("request_throughput", "output_throughput")}
        name = f"run-{changes.get('max_concurrency', 4)}-{index}.json"
        (directory / name).write_text(json.dumps(VLLM | scaled | rates | changes))
    return directory


def compared(*sides_and_options, code=None):
    """The document of a comparison, which ends with ``code``."""
    exit_code, text, error = in_process("compare", *sides_and_options, "--json")
    assert code in {None, exit_code}, error
    return json.loads(text)


def codes(comparison):
    return {warning["code"] for warning in comparison["warnings"]}


def test_a_slower_side_is_a_regression_and_the_same_load_twice_equivalent_once_there_are_repeats(tmp_path):
    a, b = repeats(tmp_path / "a", count=6), repeats(tmp_path / "b", 1.1, count=6, seed=2)
    comparison = compared(a, b, code=1)
    assert (comparison["verdict"], comparison["pairing"]) == ("regression", "unpaired")
    tpot = next(metric for metric in comparison["metrics"] if metric["name"] == "tpot_ms")
    assert tpot["ci_low"] < 1.1 < tpot["ci_high"]
    assert (tpot["blocks"], tpot["role"], tpot["cell"]) == (6, "deciding", "max_concurrency=4")
    assert "foreign-results" in codes(comparison)
    assert compared(a, repeats(tmp_path / "c", count=6, seed=2))["verdict"] == "equivalent"


def test_two_files_are_a_screening_and_say_so():
    code, text, _ = in_process("compare", WRITTEN / "vllm-0.json", WRITTEN / "vllm-1.json")
    assert code == 3
    assert "a screening of 1 block gives no verdict" in text
    assert "at least 4 on each side are needed" in text


def test_settings_that_differ_are_refused_unless_declared(tmp_path):
    a, b = repeats(tmp_path / "a"), repeats(tmp_path / "b", num_prompts=13, completed=13, model_id="other")
    with pytest.raises(NotComparableError) as refused:
        compare_foreign(runs_of_side(str(a)), runs_of_side(str(b)), CompareOptions())
    assert refused.value.differences == ("model_id: qwen2.5-0.5b against other", "num_prompts: 12 against 13")
    comparison = compared(a, b, "--allow-difference", "model_id", "--allow-difference", "num_prompts")
    assert [difference["key"] for difference in comparison["allowed_differences"]] == ["model_id", "num_prompts"]
    assert not any("must be equal" in reason for reason in comparison["reasons"])


def test_loads_are_compared_each_with_its_own(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for concurrency, factor in ((4, 1.0), (8, 1.3)):
        repeats(a, factor, max_concurrency=concurrency)
        repeats(b, factor, max_concurrency=concurrency, seed=2)
    repeats(b, 2.0, max_concurrency=16)
    comparison = compared(a, b, "--threshold", "5%")
    assert [cell["cell"] for cell in comparison["cells"]] == ["max_concurrency=4", "max_concurrency=8"]
    messages = {warning["code"]: warning["message"] for warning in comparison["warnings"]}
    assert messages["load-unmatched"].endswith("concurrency=16")


def test_failed_requests_and_counts_that_differ_make_it_invalid_unless_they_are_allowed(tmp_path):
    a, b = repeats(tmp_path / "a"), repeats(tmp_path / "b", seed=2, completed=11, failed=1)
    reason = compared(a, b, code=4)["reasons"][0]
    assert "INCOMPLETE" in reason
    assert "1 of 12 requests failed" in reason
    assert compared(a, b, "--allow-failed")["exit_code"] in {0, 3}
    comparison = compared(a, repeats(tmp_path / "c", completed=11, failed=0), code=4)
    assert "num_completed must be equal and is 12 against 11" in " ".join(comparison["reasons"])


def test_a_tail_of_too_few_requests_is_unknown_whatever_the_tool_says(tmp_path):
    for count, has_tail in ((12, False), (400, True)):
        a, b = (repeats(tmp_path / f"{side}{count}", num_prompts=count, completed=count) for side in "ab")
        names = {metric["name"] for metric in compared(a, b)["metrics"]}
        assert ("p50_ttft_ms" in names, "p99_ttft_ms" in names) == (True, has_tail)


def test_two_tools_are_compared_in_what_both_mean_with_a_warning():
    comparison = compared(WRITTEN / "vllm-0.json", WRITTEN / "profile_export_aiperf.json")
    assert {"tools-differ", "settings-unknown", "definition"} <= codes(comparison)
    deciding = [metric["name"] for metric in comparison["metrics"] if metric["role"] == "deciding"]
    assert deciding == ["tpot_ms", "ttft_ms", "output_throughput"]


def test_a_result_directory_stands_beside_result_files(tmp_path):
    blocks = tuple({"baseline": 1 + 0.001 * i, "guided": 1 + 0.001 * i} for i in range(6))
    results = write_results(tmp_path / "r", block_factors=blocks, n=1)
    side, theirs = f"{results.path}:baseline", repeats(tmp_path / "b", count=6, num_prompts=4, completed=4)
    comparison = compared(side, theirs, "--metrics", "tpot_ms", "--allow-difference", "model_id")
    assert (comparison["a"], comparison["verdict"]) == ("baseline", "improvement")
    tpot = next(metric for metric in comparison["metrics"] if metric["name"] == "tpot_ms")
    assert tpot["a"] == pytest.approx(10, rel=0.01)
    assert "tools-differ" in codes(comparison)
    change_requests(results, BASELINE, 0, error=RequestError(kind="reset", message="x"))
    assert runs_of_side(side)[0].failure == "1 of 4 requests failed"


def test_sides_that_share_no_load_or_no_metric_and_arms_without_a_name_are_refused(tmp_path):
    bare, theirs = tmp_path / "a.json", WRITTEN / "vllm-0.json"
    names = ("model_id", "num_prompts", "completed", "request_throughput")
    bare.write_text(json.dumps({name: VLLM[name] for name in names}))
    ours, lone = write_results(tmp_path / "r").path, repeats(tmp_path / "lone", max_concurrency=32)
    repeats(lone, max_concurrency=64)
    for side, code, words in (
        (lone, 4, "no load was driven on both sides"),
        (bare, 4, "Name the deciding metrics with --metrics"),
        (ours, 2, "name it as DIR:variant"),
        (f"{ours}:other", 2, "has no variant 'other'"),
    ):
        exit_code, _, error = in_process("compare", side, theirs)
        assert (exit_code, words in " ".join(error.split())) == (code, True), error
    assert compared(bare, theirs, "--metrics", "request_throughput")["exit_code"] == 3
