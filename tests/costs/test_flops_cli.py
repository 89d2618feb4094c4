"""``benchctl flops``: the published example, its JSON, and bad values."""

import json
import re

import pytest
import typer
from typer.testing import CliRunner

from benchctl.cli.commands.flops import flops
from benchctl.errors import UsageError

ACCOUNT_KEYS = {
    *(f"base_{part}_flops" for part in ("prefill", "decode", "linear", "attention", "head", "total")),
    *(f"value_{part}_flops" for part in ("prefill", "extend", "candidates", "total")),
    *(f"draft_{part}_flops" for part in ("prefill", "decode", "total")),
    *("total_flops", "ratio", "flops_per_output_token", "achieved_flops_per_s", "utilization_frac"),
}


def invoke(*options):
    app = typer.Typer()
    app.command()(flops)
    return CliRunner().invoke(app, options)


def document(*options):
    result = invoke("--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def cells(output: str, label: str) -> list[str]:
    """The numbers of the row that is called ``label``."""
    row = next(line for line in output.splitlines() if line.strip().startswith(f"{label} "))
    return re.split(r"\s{2,}", row.strip())[1:]


def test_the_defaults_are_the_published_guided_run():
    result = invoke("--output-tokens", "237710", "--wall", "87.44")
    for label, number in {
        "base total, PFLOP": "3.458",
        "value model candidates, PFLOP": "3.17",
        "total / base, prompts included": "2.104",
        "GFLOP per output token, without prompts": "30.24",
        "achieved TFLOP/s": "83.21",
        "% of h100-sxm's peak": "8.41",
    }.items():
        assert cells(result.stdout, label) == [number]
    assert "qwen2.5-7b guided by qwen2.5-1.5b, top_k 5" in result.stdout


def test_rates_without_a_wall_time_are_unknown_not_zero():
    assert cells(invoke().stdout, "achieved TFLOP/s") == ["needs --wall"]
    account = document()["account"]
    assert account["achieved_flops_per_s"] is account["utilization_frac"] is None


def test_the_json_keys_are_stable_and_carry_units():
    read = document("--observed-candidates", "2.5")
    assert set(read) == {
        "base",
        "value_model",
        "num_questions",
        "num_sequences",
        "prompt_tokens",
        "output_tokens",
        "top_k",
        "candidate_cost",
        "observed_candidates_per_token",
        "draft_model",
        "acceptance",
        "wall_s",
        "hardware",
        "peak_flops_per_s",
        "peak_source",
        "convention",
        "account",
        "observed",
        "corrections",
    }
    assert set(read["account"]) == set(read["observed"]) == ACCOUNT_KEYS
    corrections = sum(correction["flops"] for correction in read["corrections"])
    assert read["account"]["total_flops"] + corrections == read["observed"]["total_flops"]


def test_observed_candidates_are_shown_beside_the_published_ones():
    result = invoke("--observed-candidates", "2.5")
    published, observed = cells(result.stdout, "value model candidates, PFLOP")
    assert float(observed) == pytest.approx(float(published) / 2, rel=2e-3)
    assert "first-token" in result.stdout
    assert cells(result.stdout, "candidates")[0].startswith("-1.5")
    assert document("--observed-candidates", "0")["observed"]["value_total_flops"] == 0


DRAFTED = (
    "--base", "llama-160m", "--value-model", "none", "--questions", "1", "--samples", "1", "--prompt-tokens", "10",
    "--output-tokens", "9", "--draft-tokens", "3",
)  # fmt: skip


def test_drafts_that_are_all_accepted_add_nothing_but_the_passes_of_their_model():
    read = document(*DRAFTED, "--acceptance", "1", "--draft-model", "llama-68m")
    observed = read["observed"]
    # 8 tokens in two steps: 6 drafts with logits, and the backfill of the last of each draft
    assert observed["draft_decode_flops"] == 8 * 37_748_736 + 116 * 6_144 + 6 * 49_152_000
    assert observed["base_decode_flops"] == 8 * (226_492_416 + 49_152_000) + 116 * 36_864
    by_code = {correction["code"]: correction["flops"] for correction in read["corrections"]}
    assert by_code["verification"] == 0
    assert by_code["drafts"] == observed["draft_total_flops"]
    assert (read["draft_model"], read["acceptance"]) == ("llama-68m", [1.0, 1.0, 1.0])


def test_rejected_drafts_from_text_cost_their_verification():
    observed = document(*DRAFTED, "--acceptance", "0")["observed"]
    assert observed["base_decode_flops"] == 32 * (226_492_416 + 49_152_000) + 4 * 116 * 36_864
    assert observed["draft_total_flops"] == 0
    table = invoke(*DRAFTED, "--acceptance", "0").stdout
    assert "llama-160m with 3 draft tokens from text, accepted with 0, 0, 0" in table
    assert cells(table, "draft model total, PFLOP") == ["0", "0"]
    assert "draft model" not in invoke().stdout


@pytest.mark.parametrize(("convention", "ratio"), [("two-n", 2.188), ("lm-head-value-model", 2.295)])
def test_earlier_conventions_can_be_asked_for(convention, ratio):
    read = document("--convention", convention)
    assert read["convention"] == convention
    assert read["account"]["ratio"] == pytest.approx(ratio, abs=1e-3)


def test_another_device_and_model_directory_are_read(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 16, "vocab_size": 100}))
    read = document("--base", str(tmp_path), "--value-model", "none", "--hardware", "NVIDIA H200", "--wall", "1")
    assert (read["base"], read["hardware"]) == (tmp_path.name, "h200-sxm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base", "qwen2.5-8b"], "unknown model 'qwen2.5-8b': did you mean"),
        (["--value-model", "gpt"], "unknown model 'gpt'"),
        (["--hardware", "abacus"], "unknown hardware 'abacus': name one of h100-sxm"),
        (["--wall", "0"], "--wall is 0.0; give the seconds"),
        (["--wall", "nan"], "--wall is nan"),
        (["--candidate-cost", "-1"], "candidate_cost is -1.0; it must be a finite number from 0"),
        (["--observed-candidates", "6"], "--observed-candidates is 6.0; it is a mean per output token"),
        (["--observed-candidates", "nan"], "--observed-candidates is nan"),
        (["--observed-candidates", "1", "--value-model", "none"], "--observed-candidates needs a value model"),
        (["--draft-tokens", "2", "--acceptance", "0.8"], "--draft-tokens needs --value-model none"),
        (["--draft-tokens", "2"], "both --draft-tokens and --acceptance"),
        (["--draft-model", "llama-68m"], "both --draft-tokens and --acceptance"),
        ([*DRAFTED, "--acceptance", "2"], "acceptance 2 at position 1: it is a probability"),
        ([*DRAFTED, "--acceptance", "1", "--observed-candidates", "1"], "without --observed-candidates"),
        ([*DRAFTED, "--acceptance", "0.5", "--draft-model", "gpt"], "unknown model 'gpt'"),
    ],
)
def test_a_bad_value_is_refused_with_its_remedy(options, message):
    error = invoke(*options).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
