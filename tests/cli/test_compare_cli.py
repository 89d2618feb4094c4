"""``benchctl compare`` as people and CI call it."""

import json
import math
import operator

import pytest
import typer
from support.results.builders import edit_manifest, edit_requests, edit_run, share_request_set, write_results
from typer.testing import CliRunner

from benchctl.cli.commands.compare import compare, parse_threshold
from benchctl.errors import NotComparableError, RecordError, UsageError

BLOCKS = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))
KEYS = {"name", "unit", "cell", "a", "b", "ratio", "ci_low", "ci_high", "blocks", "verdict", "p", "exploratory"}

app = typer.Typer()
app.command()(compare)


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=BLOCKS)


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def sides(results):
    return f"{results.path}:baseline", f"{results.path}:guided"


def test_the_table_opens_with_the_verdict_and_shows_change_p_and_verdict(results):
    found = call(*sides(results))
    lines = found.stdout.splitlines()
    assert found.exit_code == 1
    assert lines[0].startswith(
        "regression: guided against baseline: 3 of 3 comparisons worse by more than a margin of 1%"
    )
    assert " ".join(lines[2].split()) == "cell metric baseline guided change (95% CI) p verdict"
    assert " ".join(lines[3].split()) == (
        "top_k=5 step_ms 10.1 ± 0.7% 15.69 ± 0.5% +55.4% [+53.0%, +57.8%] <0.001 regression"
    )
    assert "(regression)" in found.stdout


def test_the_footnotes_say_what_must_be_known_to_trust_the_table(results):
    text = call(*sides(results)).stdout
    for footnote in (
        "top_k=5: wall x1.554 [1.530, 1.578] = steps x1.000 * time per step x1.554 [1.530, 1.578] * remainder x1",
        "top_k=5: time per step carries 100 % of the +55%: 72 % of it lvm_forward",
        "n = 6 blocks, interleaved, baseline ran first in 6 of 6 · detectable: step_ms ",
        "margin 1% (-0.99% to +1.0%) · 3 deciding comparisons, judged together, at up to 9",
        "estimator: robust; outlying blocks count little",
        "equal in every block: num_requests, num_completed, num_failed, prompt_tokens, output_tokens",
        'declared difference: server.value_model: absent against "qwen2.5-1.5b"',
        "no noise floor: no A/A experiment of this machine is on file",
        "the ratio changes by -0.69% per block (",
    ):
        assert footnote in text


def test_all_shows_metrics_that_the_table_leaves_out(results):
    assert "p50_step_ms" not in call(*sides(results)).stdout
    assert "p50_step_ms" in call(*sides(results), "--all").stdout


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
    table, document = call(*sides(results), *arguments), call(*sides(results), *arguments, "--json")
    assert table.exit_code == document.exit_code == code
    assert table.stdout.startswith(verdict)
    assert json.loads(document.stdout)["verdict"] == verdict


def test_an_improvement_exits_with_zero(results):
    assert call(*reversed(sides(results))).exit_code == 0


def test_json_holds_each_metric_of_each_cell(results):
    document = json.loads(call(*sides(results), "--json").stdout)
    assert (document["verdict"], document["exit_code"], len(document["reasons"])) == ("regression", 1, 3)
    assert all(set(metric) >= KEYS for metric in document["metrics"])
    step = next(metric for metric in document["metrics"] if metric["name"] == "step_ms")
    assert (step["unit"], step["cell"], step["blocks"], step["exploratory"]) == ("ms", "top_k=5", 6, False)
    log_ratios = [math.log(b / a) for a, b in zip(step["a_blocks"], step["b_blocks"], strict=True)]
    assert math.log(step["ratio"]) == pytest.approx(math.fsum(map(operator.mul, step["block_weights"], log_ratios)))
    assert step["ci_low"] < step["ratio"] < step["ci_high"]
    assert len(step["a_blocks"]) == 6
    assert {d["key"] for d in document["allowed_differences"]} == {"sampling.top_k", "server.value_model"}
    assert document["warnings"][0]["code"] == "ratio-drift"


def test_json_is_valid_when_the_comparison_is_refused(results):
    edit_run(results, "000-b0-baseline", effective_config={"model": "other"})
    found = call(*sides(results), "--json")
    document = json.loads(found.stdout)
    assert isinstance(found.exception, NotComparableError)
    assert (document["verdict"], document["exit_code"]) == ("not-comparable", 4)
    assert document["reasons"] == list(found.exception.differences)
    assert document["reasons"][0].startswith('model: "other" or "qwen2.5-7b" against')


def test_json_is_valid_when_a_file_is_damaged(results):
    path = results.run("000-b0-baseline").path / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    found = call(*sides(results), "--json")
    assert isinstance(found.exception, RecordError)
    document = json.loads(found.stdout)
    assert (document["verdict"], document["exit_code"]) == ("invalid", 4)
    assert "requests.jsonl:4" in document["reasons"][0]


def test_an_invalid_comparison_shows_its_table_and_exits_with_four(results):
    edit_requests(results, "000-b0-baseline", lambda r: None if r.index == 0 else r)
    found = call(*sides(results))
    assert found.exit_code == 4
    assert found.stdout.startswith("invalid: guided against baseline cannot be judged: ")
    assert "reason: top_k=5: 000-b0-baseline: check requests failed" in found.stdout
    assert json.loads(call(*sides(results), "--json").stdout)["reasons"]


def test_a_difference_can_be_allowed_on_the_command_line(results):
    for run in results.runs():
        if "guided" in run.path.name:
            config = run.read().effective_config | {"server.max_num_seqs": 8, "server.block_size": 32}
            edit_run(results, run.path.name, effective_config=config)
    one = call(*sides(results), "--allow-difference", "server.max_num_seqs")
    assert isinstance(one.exception, NotComparableError)
    two = ("--allow-difference", "server.max_num_seqs", "--allow-difference", "server.block_size")
    assert call(*sides(results), *two).exit_code == 1


def test_exact_metrics_that_differ_are_shown(results):
    longer = write_results(results.path.parent / "longer", block_factors=BLOCKS, num_requests=5)
    share_request_set(longer, results)
    document = json.loads(call(f"{results.path}:baseline", f"{longer.path}:baseline", "--json").stdout)
    assert "num_requests must be equal and is 4 against 5" in " ".join(document["reasons"])
    assert "num_requests" in call(f"{results.path}:baseline", f"{longer.path}:baseline").stdout


def test_numbers_of_blocks_that_differ_between_cells_are_a_range(tmp_path):
    results = write_results(tmp_path / "r", block_factors=BLOCKS, cells=({"top_k": 2}, {"top_k": 5}))
    edit_run(results, "001-b0-guided-top_k2", state="failed")
    text = call(*sides(results)).stdout
    assert "n = 5 to 6 blocks" in text


def test_one_block_shows_a_change_without_an_interval(tmp_path):
    results = write_results(tmp_path / "r", block_factors=BLOCKS[:1])
    found = call(*sides(results))
    assert found.exit_code == 3
    assert "+58.1% [one block]" in found.stdout
    assert "reason: top_k=5: step_ms" in found.stdout


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), ("2.5 %", 0.025), ("0", 0.0)])
def test_a_threshold_is_a_percentage_or_a_fraction(text, value):
    assert parse_threshold(text) == pytest.approx(value)


@pytest.mark.parametrize("arguments", [("--threshold", "much"), ("--threshold", "1"), ("--confidence", "95")])
def test_wrong_options_are_usage_errors(results, arguments):
    found = call(*sides(results), *arguments)
    assert isinstance(found.exception, UsageError)
    assert found.exception.exit_code == 2


def test_sides_with_equal_names_are_told_apart_by_their_paths(results):
    other = write_results(results.path.parent / "elsewhere" / "r", block_factors=BLOCKS)
    edit_manifest(other, created_at="2026-02-01T00:00:00Z")
    assert f"{other.path} against {results.path}" in call(results.path, other.path).stdout.splitlines()[0]


def test_a_value_of_ten_thousand_or_more_is_written_out(tmp_path):
    fast = tuple({"baseline": 0.01, "guided": 0.01} for _ in range(6))
    results = write_results(tmp_path / "r", block_factors=fast)
    assert "80,000" in call(*sides(results)).stdout


def test_markdown_has_the_rows_of_the_table_and_its_footnotes(results):
    plain, found = call(*sides(results)).stdout, call(*sides(results), "--markdown")
    assert found.exit_code == 1
    verdict, _, headings, rule, first, *_ = found.stdout.splitlines()
    assert verdict == f"**{plain.splitlines()[0].replace('_', chr(92) + '_')}**"
    assert headings == "| cell | metric | baseline | guided | change (95% CI) | p | verdict |"
    assert rule == "|" + " --- |" * 7
    fields = [" ".join(field.replace("\\", "").split()) for field in first.strip("|").split("|")]
    assert " ".join(fields) == " ".join(plain.splitlines()[3].split())
    assert "\n- n = 6 blocks, interleaved, baseline ran first in 6 of 6" in found.stdout


def test_two_forms_at_once_are_refused(results):
    assert isinstance(call(*sides(results), "--markdown", "--json").exception, UsageError)
