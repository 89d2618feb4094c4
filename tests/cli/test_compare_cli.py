"""``benchctl compare`` as people and CI call it: two sides, a directory, files to write, the summary of a job."""

import csv
import json
import math
import operator
import re
from pathlib import Path

import pytest
from support.cli import benchctl, document, in_process, only_result, printed, refusal
from support.results.builders import (
    PROFILE_YAML,
    edit_manifest,
    edit_requests,
    edit_run,
    share_request_set,
    write_results,
)

from benchctl.cli.commands.compare import SUFFIXES
from benchctl.cli.screen import PICTURE_SUFFIXES

BLOCKS = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))
KEYS = {"name", "unit", "cell", "a", "b", "ratio", "ci_low", "ci_high", "blocks", "verdict", "p", "exploratory"}
FOREIGN = Path(__file__).parents[1] / "interop" / "foreign"


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=BLOCKS)


def sides(results):
    return f"{results.path}:baseline", f"{results.path}:guided"


def compared(*words, code=1):
    """Output of a comparison that ends with ``code``."""
    actual, out, err = in_process("compare", *words)
    assert actual == code, out + err
    return out


def as_document(*words, code=1):
    return json.loads(compared(*words, "--json", code=code))


def test_the_table_opens_with_the_verdict_and_its_footnotes_say_what_must_be_known_to_trust_it(results):
    text = compared(*sides(results))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].startswith(
        "regression: guided against baseline (simulated): 3 of 3 comparisons worse by more than a margin of 1%"
    )
    table = next(i for i, line in enumerate(lines) if line.startswith("cell metric"))
    assert lines[table : table + 2] == [
        "cell metric baseline guided change (95% CI) p verdict",
        "top_k=5 step_ms 10.1 ± 0.7% 15.69 ± 0.5% +55.4% [+53.0%, +57.8%] <0.001 regression",
    ]
    for words in (
        "(regression)",
        "changed: top_k 5 against -1 and value_model qwen2.5-1.5b against none",
        "measured on: sim, qwen2.5-7b, a simulated h100-sxm; no GPU was measured",
        "cause: wall time +55%: a step takes 15.7 ms instead of 10.1 ms; 72% of the step's difference is ",
        "trust: 6 blocks, interleaved; 3 comparisons judged together, each by its 9",
        "no noise floor on file",
        "the ratio changes by -0.69% per block (",
    ):
        assert words in text
    assert "p50_step_ms" not in text
    detailed = compared(*sides(results), "--all")
    for words in (
        "p50_step_ms",
        "n = 6 blocks, interleaved, baseline ran first in 6 of 6 · detectable: step_ms ",
        "margin 1% (-0.99% to +1.0%)",
        "estimator: robust; outlying blocks count little",
        "equal in every block: num_requests, num_completed, num_failed, prompt_tokens, output_tokens",
        'declared difference: server.value_model: absent against "qwen2.5-1.5b"',
        "no noise floor: no A/A experiment of this machine is on file",
    ):
        assert words in detailed


def test_markdown_has_the_rows_of_the_table_and_its_footnotes(results):
    plain, markdown = compared(*sides(results)), compared(*sides(results), "--markdown")
    verdict, _, change, *_ = markdown.splitlines()
    headings, rule, first, *_ = [line for line in markdown.splitlines() if line.startswith("|")]
    assert verdict == f"**{plain.splitlines()[0].replace('_', chr(92) + '_')}**"
    assert headings == "| cell | metric | baseline | guided | change (95% CI) | p | verdict |"
    assert rule == "|" + " --- |" * 7
    row = next(line for line in plain.splitlines() if line.startswith("top_k=5  step_ms"))
    assert first.replace("|", " ").replace("\\", "").split() == row.split()
    assert change.startswith("- changed: ")


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        ([], 1, "regression"),
        (["--threshold", "80%"], 0, "equivalent"),
        (["--threshold", "0.8"], 0, "equivalent"),
        (["--threshold", "56%"], 3, "inconclusive"),
        (["--metrics", "num_failed, tokens_per_step"], 0, "equivalent"),
    ],
)
def test_the_exit_code_is_that_of_the_verdict(results, arguments, code, verdict):
    assert compared(*sides(results), *arguments, code=code).startswith(verdict)
    assert as_document(*sides(results), *arguments, code=code)["verdict"] == verdict


def test_json_holds_each_metric_of_each_cell(results):
    whole = as_document(*sides(results))
    assert (whole["verdict"], whole["exit_code"], len(whole["reasons"])) == ("regression", 1, 3)
    assert all(set(metric) >= KEYS for metric in whole["metrics"])
    step = next(metric for metric in whole["metrics"] if metric["name"] == "step_ms")
    assert (step["unit"], step["cell"], step["blocks"], step["exploratory"]) == ("ms", "top_k=5", 6, False)
    log_ratios = [math.log(b / a) for a, b in zip(step["a_blocks"], step["b_blocks"], strict=True)]
    assert math.log(step["ratio"]) == pytest.approx(math.fsum(map(operator.mul, step["block_weights"], log_ratios)))
    assert step["ci_low"] < step["ratio"] < step["ci_high"]
    assert len(step["a_blocks"]) == 6
    assert {d["key"] for d in whole["allowed_differences"]} == {"sampling.top_k", "server.value_model"}
    assert whole["warnings"][0]["code"] == "ratio-drift"


def test_json_is_valid_when_the_comparison_is_refused_invalid_or_of_damaged_files(results):
    run = results.run("000-b0-baseline")
    config = run.read().effective_config
    edit_run(results, run.path.name, effective_config={"model": "other"})
    refused = as_document(*sides(results), code=4)
    assert (refused["verdict"], refused["exit_code"]) == ("not-comparable", 4)
    assert refused["reasons"][0].startswith('model: "other" or "qwen2.5-7b" against')
    edit_run(results, run.path.name, effective_config=config)
    edit_requests(results, run.path.name, lambda r: None if r.index == 0 else r)
    table = compared(*sides(results), code=4)
    assert table.startswith("invalid: guided against baseline (simulated) cannot be judged: ")
    assert "\ntop_k=5: 000-b0-baseline: check requests failed" in table
    log = run.path / "requests.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    damaged = as_document(*sides(results), code=4)
    assert (damaged["verdict"], "requests.jsonl:3" in damaged["reasons"][0]) == ("invalid", True)


def test_a_difference_can_be_allowed_on_the_command_line(results):
    for run in results.runs():
        if "guided" in run.path.name:
            config = run.read().effective_config | {"server.max_num_seqs": 8, "server.block_size": 32}
            edit_run(results, run.path.name, effective_config=config)
    one, other = (("--allow-difference", name) for name in ("server.max_num_seqs", "server.block_size"))
    compared(*sides(results), *one, code=4)
    compared(*sides(results), *one, *other)


def test_exact_metrics_that_differ_are_shown_and_sides_with_equal_names_are_told_apart(results):
    longer = write_results(results.path.parent / "elsewhere" / "r", block_factors=BLOCKS, num_requests=5)
    share_request_set(longer, results)
    edit_manifest(longer, created_at="2026-02-01T00:00:00Z")
    baselines = (f"{results.path}:baseline", f"{longer.path}:baseline")
    reasons = as_document(*baselines, code=4)["reasons"]
    assert "num_requests must be equal and is 4 against 5" in " ".join(reasons)
    verdict, *_ = compared(*baselines, code=4).splitlines()
    assert f"{longer.path}:baseline against {results.path}:baseline" in verdict


def test_one_block_shows_a_change_without_an_interval(tmp_path):
    (tmp_path / "one").mkdir()
    text = compared(*sides(write_results(tmp_path / "one", block_factors=BLOCKS[:1])), code=3)
    assert "+58.1% [unknown with 1 block]" in text


def test_the_threshold_of_the_profile_counts_where_none_is_named(results):
    results.write_profile(f"{PROFILE_YAML}comparison: {{threshold: 80%}}\n")
    assert compared(*sides(results), code=0).startswith(
        "equivalent: guided against baseline (simulated): 3 of 3 comparisons"
    )
    assert compared(*sides(results), "--threshold", "1%").startswith("regression")


def test_a_baseline_is_kept_at_first_compared_with_later_and_refreshed_on_demand(results, tmp_path):
    kept, side = tmp_path / "kept", ("--baseline", tmp_path / "kept")
    assert compared(results.path, *side, code=0) == f"{results.path} is kept as the baseline: {kept}\n"
    faster = [{name: factor * 0.5 for name, factor in factors.items()} for factors in BLOCKS]
    other = write_results(tmp_path / "other", block_factors=faster)
    share_request_set(results, other)
    assert compared(other.path, *side, code=0).startswith("improvement: other against kept")
    before = (kept / "runs/000-b0-baseline/steps.jsonl").read_bytes()
    slower = write_results(tmp_path / "slower", block_factors=BLOCKS)
    compared(slower.path, *side, code=0)
    assert (kept / "runs/000-b0-baseline/steps.jsonl").read_bytes() == before
    compared(other.path, *side, "--refresh", code=0)
    assert (kept / "runs/000-b0-baseline/steps.jsonl").read_bytes() != before
    assert compared(slower.path, *side, code=1).startswith("regression")
    edit_manifest(slower, stop="natural")
    assert compared(slower.path, *side, "--refresh", code=0) == ""
    assert '"natural"' in (kept / "manifest.json").read_text()
    edit_manifest(slower, state="failed")
    for words, code in (((slower.path, "--baseline", tmp_path / "new"), 4), ((slower.path, "--refresh"), 2)):
        compared(*words, code=code)
    compared(slower.path, slower.path, *side, code=2)
    (tmp_path / "notes").mkdir()
    compared(slower.path, "--baseline", tmp_path / "notes", code=2)


def data_of(page: Path):
    (content,) = re.findall(r'<script[^>]*id="benchctl-data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(content)


def test_each_suffix_gives_its_form_and_the_screen_stays_what_it_was(results, tmp_path):
    files = {suffix: tmp_path / f"c{suffix}" for suffix in SUFFIXES}
    words = [word for file in files.values() for word in ("--output", file)]
    assert compared(*sides(results), *words) == compared(*sides(results))
    assert json.loads(files[".json"].read_text()) == as_document(*sides(results))
    assert files[".md"].read_text() == compared(*sides(results), "--markdown")
    rows = list(csv.DictReader(files[".csv"].read_text().splitlines()))
    step = next(row for row in rows if row["name"] == "step_ms")
    expected = {"cell": "top_k=5", "role": "deciding", "verdict": "regression", "blocks": "6"}
    assert {name: step[name] for name in expected} == expected
    for suffix, beginning in ((".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF")):
        assert files[suffix].read_bytes().startswith(beginning)
    assert "<title>regression: guided against baseline</title>" in files[".html"].read_text()
    compared(*sides(results), "--threshold", "90%", "--metrics", "step_ms", "-o", files[".html"], code=0)
    assert "<title>equivalent: guided against baseline</title>" in files[".html"].read_text()


def test_files_of_other_tools_have_a_page_with_their_verdict_percentiles_and_requests(tmp_path):
    whole = json.loads((FOREIGN / "vllm-0.json").read_text())
    whole |= {"ttfts": [0.01 + 0.001 * k for k in range(12)], "output_lens": [16] * 12, "errors": [""] * 12}
    directories = [tmp_path / side for side in "ab"]
    for directory, factor in zip(directories, (1.0, 1.5), strict=True):
        directory.mkdir()
        for i in range(5):
            gap = 0.006 * factor * (1 + 0.01 * i)
            times = {"itls": [[gap] * 15] * 12, "mean_tpot_ms": gap * 1e3, "median_tpot_ms": gap * 1e3}
            (directory / f"{i}.json").write_text(json.dumps(whole | times))
    page = tmp_path / "page.html"
    compared(*directories, "--metrics", "tpot_ms", "-o", page)
    for words in ("<title>regression: b against a</title>", 'data-chart="latencies"', "5 against 5 runs"):
        assert words in page.read_text()
    assert re.search(r"<td>b</td><td class=\"num\">9\.1\d+ \[", page.read_text())
    compared(FOREIGN / "vllm-0.json", FOREIGN / "vllm-1.json", "-o", page, code=3)
    assert "screening" in page.read_text()
    assert 'data-chart="latencies"' not in page.read_text(), "there are no single requests"


def test_markdown_is_appended_to_the_summary_of_a_job_where_there_is_one(results, tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    code, _, message = in_process("compare", *sides(results), "--github-summary")
    assert (code, "GITHUB_STEP_SUMMARY, which is not set" in message) == (2, True)
    summary = tmp_path / "summary.md"
    summary.write_text("what another step wrote\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    compared(*sides(results), "--github-summary")
    assert summary.read_text() == f"what another step wrote\n{compared(*sides(results), '--markdown')}"


def test_a_refusal_is_written_where_words_can_be(results, tmp_path, monkeypatch):
    edit_run(results, "000-b0-baseline", effective_config={"model": "other"})
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    files = [tmp_path / f"c{suffix}" for suffix in (".json", ".md", ".png")]
    compared(*sides(results), "--github-summary", *(word for file in files for word in ("-o", file)), code=4)
    assert json.loads(files[0].read_text())["verdict"] == "not-comparable"
    for path in (files[1], tmp_path / "summary.md"):
        assert path.read_text().startswith("**not compared: the two sides differ")
        assert 'model: "other"' in path.read_text()
    assert not files[2].exists()


SMALL = ["--set", "workload.num_prompts=2", "--set", "workload.output_len=16", "--set", "gates=[]"]
CONTROLS = [f"guided-{control}" for control in ("flags", "idle", "neutral")]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory) -> Path:
    """A ladder of controls in virtual time: four variants beside the baseline, three of them controls."""
    cwd = tmp_path_factory.mktemp("controls")
    printed("simulate", "--profile", "controls", "--engine", "sim-exact", "--blocks", "6", *SMALL, cwd=cwd)
    return only_result(cwd)


def test_a_directory_has_every_variant_against_the_baseline_with_the_numbers_and_the_verdict_of_the_page(path):
    whole, page = document("compare", path, code=1), data_of(path / "report.html")
    assert page["verdict"] == {key: whole[key] for key in ("verdict", "exit_code", "summary")}
    first, *others = [(one["b"], one["is_control"]) for one in whole["comparisons"]]
    assert first == ("guided", False)
    assert sorted(others) == [(name, True) for name in CONTROLS]
    plain = [{k: v for k, v in one.items() if k not in {"is_control", "sides"}} for one in whole["comparisons"]]
    assert plain == page["comparisons"]
    text = printed("compare", path, code=1)
    assert all(f": {name} against baseline (simulated): " in text for name in ("guided", *CONTROLS))
    assert text.count("control, which decides nothing:") == 3
    assert text.startswith("regression: ")


def test_every_form_of_output_holds_every_comparison(path, tmp_path):
    files = {suffix: tmp_path / f"c{suffix}" for suffix in SUFFIXES if suffix not in PICTURE_SUFFIXES}
    printed("compare", path, *(word for file in files.values() for word in ("-o", file)), code=1)
    assert len(json.loads(files[".json"].read_text())["comparisons"]) == 4
    rows = csv.DictReader(files[".csv"].read_text().splitlines())
    assert {row["sides"] for row in rows} == {f"{name} against baseline" for name in ("guided", *CONTROLS)}
    assert files[".md"].read_text().count("against baseline (simulated): ") >= 4
    assert len(data_of(files[".html"])["comparisons"]) == 4
    assert "a picture shows one comparison" in refusal("compare", path, "-o", tmp_path / "c.png")


def test_the_worst_verdict_is_that_of_the_whole(path):
    """Not comparable before regression: the numbers of the first cannot be trusted at all."""
    run = next((path / "runs").glob("*-guided-neutral*")) / "requests.jsonl"
    whole = run.read_bytes()
    run.write_bytes(whole[:-30])
    judged = benchctl("compare", path, "--json")
    run.write_bytes(whole)
    assert (judged.returncode, json.loads(judged.stdout)["verdict"]) == (4, "invalid")


def test_a_directory_with_the_baseline_alone_is_an_error_of_usage(tmp_path):
    alone = ["--set", "variants.guided=null", "--set", "allowed_differences=[]", "--set", "sweep.top_k=null"]
    printed("simulate", "--profile", "ci-smoke", "--blocks", "1", *SMALL, *alone, cwd=tmp_path)
    assert "only baseline was planned" in refusal("compare", only_result(tmp_path))
