"""``benchctl speculation`` from the command line: the law, a server's load, the picture, and every refusal."""

import json
from pathlib import Path

import pytest
from support.cli import benchctl
from support.step_time import MODELS, planted_run, write_table

PLANTED = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.2, "layers": 50.0, "requests": 12.0, "steps": 120.0}
SERVER = ("--model", "qwen2.5-7b", "--hardware", "h100-sxm")


def document(*options: object) -> dict:
    printed = benchctl("speculation", *options, "--json")
    assert printed.returncode == 0, printed.stderr
    return json.loads(printed.stdout)


def test_the_table_has_the_law_at_every_draft_length() -> None:
    printed = benchctl("speculation", "--acceptance", "0.8", "--draft-tokens", "1..5", "--draft-cost", "0.05")
    assert printed.returncode == 0, printed.stderr
    (line,) = [line for line in printed.stdout.splitlines() if line.lstrip().startswith("5 ")]
    assert line.split()[:7] == ["5", "0.8000", "0.3277", "3.689", "3.362", "1.097", "2.951"]
    assert "8 draft tokens are best: 3.092 times as fast" in printed.stdout


def test_one_draft_without_bonus_tokens_is_called_slower_than_none() -> None:
    printed = benchctl("speculation", "--acceptance", "0.9", "--no-bonus", "--draft-tokens", "1,2")
    assert "without bonus tokens, a step with 1 draft token yields 4.76% less per second" in printed.stdout
    assert document("--acceptance", "0.9", "--no-bonus")["lengths"][0]["break_even_acceptance"] is None


def test_a_backfill_that_costs_its_limit_makes_bonus_tokens_worth_nothing() -> None:
    limit = document("--acceptance", "0.8")["lengths"][1]["backfill_limit"]["value"]
    length = document("--acceptance", "0.8", "--backfill-cost", limit)["lengths"][1]
    assert length["speed_up"]["value"] == pytest.approx(length["speed_up_without_bonus"]["value"])


def test_counters_and_fractions_give_the_same_intervals() -> None:
    of_counters = document("--drafts", "100", "--accepted", "80,60")
    of_fractions = document("--acceptance", "80/100,60/80")
    assert of_counters == of_fractions
    assert of_counters["lengths"][0]["tokens"]["low"] < 1.8 < of_counters["lengths"][0]["tokens"]["high"]
    assert sum(each["share_frac"] for each in of_counters["best"]["shares"]) == pytest.approx(1)


def test_step_times_of_two_models_replace_the_constants() -> None:
    both = document("--acceptance", "0.8", *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,64,1024")
    load = both["load"]
    assert both["draft_cost"] == pytest.approx(0.0705, abs=5e-4)
    (single, _, large) = load["batches"]
    of_law = [length["speed_up"]["value"] for length in both["lengths"]]
    of_load = [point["speed_up"]["value"] for point in single["points"][1:]]
    assert of_load == pytest.approx(of_law, rel=0.01)
    assert large["best_num_draft_tokens"] < single["best_num_draft_tokens"]
    assert [each["num_draft_tokens"] for each in load["paying"]] == [*range(1, 9)]


def test_a_rate_of_requests_adds_latency() -> None:
    printed = benchctl("speculation", "--acceptance", "0.8", *SERVER, "--rate", "1,40")
    assert printed.returncode == 0, printed.stderr
    assert "Requests that arrive at random" in printed.stdout
    rates = document("--acceptance", "0.8", *SERVER, "--rate", "1,40")["load"]["rates"]
    assert rates[0]["loads"][0]["e2el_s"] > rates[0]["loads"][4]["e2el_s"]


def fitted_file(directory: Path, num_draft_tokens: int = 0) -> Path:
    """A model fitted to planted steps in which each decoding row verifies so many drafts."""
    tables = [
        write_table(
            directory / f"{i}.csv",
            planted_run(*deployment, PLANTED, seed=i, noise=0.02, num_steps=60, row_tokens=num_draft_tokens + 1),
        )
        for i, deployment in enumerate(MODELS)
    ]
    file = directory / "m.json"
    assert benchctl("steptime", "fit", *tables, "-o", file).returncode == 0
    return file


def test_a_model_fitted_without_drafts_is_said_not_to_know_their_verification(tmp_path: Path) -> None:
    server = ("--model", "qwen2.5-7b", "--step-time-model", fitted_file(tmp_path), "--batch-size", "8")
    (warning,) = document("--acceptance", "0.8", "--draft-tokens", "1,4", *server)["warnings"]
    assert warning["code"] == "drafts-not-fitted"
    assert "at most 1 query token for each decoding sequence" in warning["message"]
    assert "a verification of 4 draft tokens has 5" in warning["message"]
    assert "fit the model to steps with as many drafts" in warning["message"]
    printed = benchctl("speculation", "--acceptance", "0.8", "--draft-tokens", "1,4", *server)
    assert f"warning: {warning['message']}" in printed.stdout


def test_a_model_fitted_to_as_many_drafts_has_no_such_warning_and_one_of_more_drafts_has(tmp_path: Path) -> None:
    server = ("--model", "qwen2.5-7b", "--step-time-model", fitted_file(tmp_path, 4), "--batch-size", "8")
    assert document("--acceptance", "0.8", "--draft-tokens", "1,4", *server)["warnings"] == []
    (warning,) = document("--acceptance", "0.8", "--draft-tokens", "1,5", *server)["warnings"]
    assert "at most 5 query tokens" in warning["message"]
    assert document("--acceptance", "0.8", *SERVER)["warnings"] == []


def test_a_fitted_model_prices_target_and_draft(tmp_path: Path) -> None:
    server = ("--model", "qwen2.5-7b", "--draft-model", "qwen2.5-0.5b", "--step-time-model", fitted_file(tmp_path))
    load = document("--acceptance", "0.8", *server, "--batch-size", "1,8")["load"]
    assert load["step_times"].startswith("step-time model of qwen2.5-7b on h100-sxm")
    # Launches of its 24 layers make a pass of the small draft dear: fewer drafts are best than at the roofline.
    roofline = document("--acceptance", "0.8", *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1")
    assert load["batches"][0]["best_num_draft_tokens"] < roofline["load"]["batches"][0]["best_num_draft_tokens"]


SWEEP = """
engine: {kind: sim, options: {cost_model: roofline, max_num_seqs: 16, acceptance: [0.85, 0.8, 0.75, 0.7],
  draft_model: qwen2.5-0.5b, backfill: prefill}}
model: qwen2.5-7b
hardware: h100-sxm
blocks: 3
workload:
  dataset: synthetic
  input_len: 100
  output_len: 120
  num_prompts: 16
  arrival: {kind: closed-loop, max_concurrency: 8}
variants:
  baseline: {}
  drafts: {server: {num_speculative_tokens: 1}}
sweep:
  num_speculative_tokens: [1, 2, 4]
  bonus_token: [true, false]
allowed_differences: [server.num_speculative_tokens, server.bonus_token]
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    (directory / "sweep.yaml").write_text(SWEEP, encoding="utf-8")
    simulated = benchctl("simulate", "--profile", "sweep.yaml", "--quiet", cwd=directory)
    assert simulated.returncode == 0, simulated.stderr
    return directory / "results" / "sweep" / "latest"


def test_a_simulated_sweep_agrees_with_the_law_at_every_length_with_and_without_bonus(results: Path) -> None:
    measured = document(results)["measured"]
    arms = {(arm["num_draft_tokens"], arm["bonus"]): arm for arm in measured["arms"]}
    assert set(arms) == {(num, bonus) for num in (1, 2, 4) for bonus in (True, False)}
    assert all(arm["tokens_agree"] for arm in arms.values())
    assert all(arm["speed_up_agrees"] for arm in arms.values())
    assert arms[1, False]["measured_speed_up"]["high"] < 1 < arms[1, True]["measured_speed_up"]["low"]
    assert arms[2, True]["expected_tokens"]["value"] < arms[2, True]["endless_tokens"]["value"]


def test_the_planted_acceptance_and_costs_are_found_again(results: Path) -> None:
    law = document(results)
    for planted, length in zip((0.85, 0.8, 0.75, 0.7), law["lengths"], strict=False):
        assert length["acceptance"]["low"] - 0.01 <= planted <= length["acceptance"]["high"] + 0.01
    assert law["draft_cost"] == pytest.approx(0.072, abs=0.005)
    assert law["measured"]["backfill_cost"]["low"] > 0.02
    assert law["lengths"][4]["is_extrapolated"]
    printed = benchctl("speculation", results, "--draft-tokens", "1..4", "--plot", results / "law.png")
    assert "speed-up: law and measurement agree within their intervals, or 0.5%, in 6 of 6 arms" in printed.stdout
    assert (results / "law.png").read_bytes().startswith(b"\x89PNG")


def test_the_measured_acceptance_is_carried_to_another_server(results: Path) -> None:
    load = document(results, *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,512")["load"]
    assert load["batches"][0]["points"][1]["speed_up"]["low"] is not None
    refused = benchctl("speculation", results, "--acceptance", "0.8")
    assert refused.returncode == 2
    assert "DIR has the acceptance that was measured" in refused.stderr


@pytest.mark.parametrize("server", [(), SERVER], ids=["law", "load"])
def test_the_picture_is_a_png(server: tuple[str, ...], tmp_path: Path) -> None:
    printed = benchctl("speculation", "--acceptance", "0.8", *server, "--plot", tmp_path / "s.png")
    assert printed.returncode == 0, printed.stderr
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert f"picture: {tmp_path / 's.png'}" in printed.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "state the acceptance once"),
        ("--acceptance 0.8 --drafts 10 --accepted 8", "state the acceptance once"),
        ("--drafts 10", "belong together"),
        ("--acceptance 1.2", "it is a probability from 0 to 1"),
        ("--acceptance nine", "expected numbers separated by commas"),
        ("--acceptance 80/x", "write counts as accepted/judged"),
        ("--acceptance 90/80", "no more accepted than judged"),
        ("--drafts 10 --accepted 5,6", "counters by position never increase"),
        ("--acceptance 0.8 --draft-tokens 0", "each must be from 1 to"),
        ("--acceptance 0.8 --draft-tokens 8..1", "write a range as 1..8"),
        ("--acceptance 0.8 --draft-cost -1", "draft cost -1"),
        ("--acceptance 0.8 --draft-model qwen2.5-0.5b", "name the model that is served"),
        ("--acceptance 0.8 --model qwen2.5-7b", "--model needs a device"),
        ("--acceptance 0.8 --model qwen2.5-7b --hardware h100-sxm --batch-size 0", "each must be from 1 up"),
        ("--acceptance 0.8 --model qwen2.5-7b --hardware h100-sxm --rate 0", "must be above 0"),
        (
            "--acceptance 0.8 --model qwen2.5-7b --hardware h100-sxm --backfill-cost 0.1",
            "--backfill-cost is a constant",
        ),
        ("--acceptance 0.8 --draft-cost 0.1 --draft-model qwen2.5-0.5b", "both state the cost of a draft"),
    ],
)
def test_what_cannot_be_is_refused_with_one_message(options: str, message: str) -> None:
    refused = benchctl("speculation", *options.split())
    assert refused.returncode == 2
    assert message in refused.stderr
    assert refused.stderr.count("benchctl:") == 1
    assert not refused.stdout
