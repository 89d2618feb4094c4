"""``benchctl speculation`` from the command line: the law, the load of a server, and models without drafts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import benchctl, document, printed, refusal
from support.servers.simulator import sim_server
from support.step_time import MODELS, planted_run, write_table

from benchctl.steptime.model import Provenance, StepTimeModel, write_model
from benchctl.steptime.work import Coefficient

PLANTED = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.2, "layers": 50.0, "requests": 12.0, "steps": 120.0}
SERVER = ("--model", "qwen2.5-7b", "--hardware", "h100-sxm")


def law(*options: object) -> dict:
    return document("speculation", *options)


def test_the_table_has_the_law_at_every_draft_length_and_says_what_is_best_and_what_slower() -> None:
    output = printed("speculation", "--acceptance", "0.8", "--draft-tokens", "1..5", "--draft-cost", "0.05")
    (line,) = [line for line in output.splitlines() if line.lstrip().startswith("5 ")]
    assert line.split()[:7] == ["5", "0.8000", "0.3277", "3.689", "3.362", "1.097", "2.951"]
    assert "8 draft tokens are best: 3.092 times as fast" in output
    output = printed("speculation", "--acceptance", "0.9", "--no-bonus", "--draft-tokens", "1,2")
    assert "without bonus tokens, a step with 1 draft token yields 4.76% less per second" in output
    assert law("--acceptance", "0.9", "--no-bonus")["lengths"][0]["break_even_acceptance"] is None


def test_a_backfill_that_costs_its_limit_makes_bonus_tokens_worth_nothing() -> None:
    limit = law("--acceptance", "0.8")["lengths"][1]["backfill_limit"]["value"]
    length = law("--acceptance", "0.8", "--backfill-cost", limit)["lengths"][1]
    assert length["speed_up"]["value"] == pytest.approx(length["speed_up_without_bonus"]["value"])


def test_counters_and_fractions_give_the_same_intervals() -> None:
    of_counters = law("--drafts", "100", "--accepted", "80,60")
    assert of_counters == law("--acceptance", "80/100,60/80")
    assert of_counters["lengths"][0]["tokens"]["low"] < 1.8 < of_counters["lengths"][0]["tokens"]["high"]
    assert sum(each["share_frac"] for each in of_counters["best"]["shares"]) == pytest.approx(1)


def test_step_times_of_two_models_replace_the_constants_and_a_rate_of_requests_adds_latency() -> None:
    both = law("--acceptance", "0.8", *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,64,1024")
    (single, _, large) = both["load"]["batches"]
    assert both["draft_cost"] == pytest.approx(0.0705, abs=5e-4)
    of_law = [length["speed_up"]["value"] for length in both["lengths"]]
    assert [point["speed_up"]["value"] for point in single["points"][1:]] == pytest.approx(of_law, rel=0.01)
    assert large["best_num_draft_tokens"] < single["best_num_draft_tokens"]
    assert [each["num_draft_tokens"] for each in both["load"]["paying"]] == [*range(1, 9)]
    at_rate = ("--acceptance", "0.8", *SERVER, "--rate", "1,40")
    assert "Requests that arrive at random" in printed("speculation", *at_rate)
    loads = law(*at_rate)["load"]["rates"][0]["loads"]
    assert loads[0]["e2el_s"] > loads[4]["e2el_s"]


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF")])
def test_the_suffix_of_a_picture_says_its_kind(tmp_path: Path, suffix: str, beginning: bytes) -> None:
    path = tmp_path / f"x{suffix}"
    server = SERVER if suffix == ".png" else ()  # a picture of the load, or of the law
    drawn = printed("speculation", "--acceptance", "0.8", *server, "--draft-tokens", "2", "--plot", path)
    assert f"picture: {path}" in drawn
    assert path.read_bytes().startswith(beginning)


def fitted_file(directory: Path, num_draft_tokens: int = 0) -> Path:
    """A model fitted to planted steps in which each decoding row verifies so many drafts."""
    size = {"noise": 0.02, "num_steps": 60, "row_tokens": num_draft_tokens + 1}
    runs = [planted_run(*deployment, PLANTED, seed=i, **size) for i, deployment in enumerate(MODELS)]
    tables = [write_table(directory / f"{i}.csv", run) for i, run in enumerate(runs)]
    printed("steptime", "fit", *tables, "-o", directory / "m.json")
    return directory / "m.json"


def test_a_fitted_model_prices_target_and_draft_and_is_said_not_to_know_drafts_that_it_never_saw(
    tmp_path: Path,
) -> None:
    target = ("--acceptance", "0.8", "--model", "qwen2.5-7b", "--step-time-model", fitted_file(tmp_path))
    server = (*target, "--batch-size", "1,8", "--draft-tokens", "1,4")
    (warning,) = law(*server)["warnings"]
    assert warning["code"] == "drafts-not-fitted"
    for text in (
        "at most 1 query token for each decoding sequence",
        "a verification of 4 draft tokens has 5",
        "fit the model to steps with as many drafts",
    ):
        assert text in warning["message"]
    assert f"warning: {warning['message']}" in printed("speculation", *server)
    load = law(*target, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,8")["load"]
    assert load["step_times"].startswith("step-time model of qwen2.5-7b on h100-sxm")
    # Launches of its 24 layers make a pass of the small draft dear: fewer drafts are best than at the roofline.
    roofline = law("--acceptance", "0.8", *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1")
    assert roofline["warnings"] == []
    assert load["batches"][0]["best_num_draft_tokens"] < roofline["load"]["batches"][0]["best_num_draft_tokens"]
    server = (*target[:-1], fitted_file(tmp_path, 4), "--batch-size", "8", "--draft-tokens")
    assert law(*server, "1,4")["warnings"] == []
    assert "at most 5 query tokens" in law(*server, "1,5")["warnings"][0]["message"]


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
    printed("simulate", "--profile", "sweep.yaml", "--quiet", cwd=directory)
    return directory / "results" / "sweep" / "latest"


def test_a_simulated_sweep_agrees_with_the_law_and_has_the_planted_acceptance_and_costs(results: Path) -> None:
    whole = law(results)
    arms = {(arm["num_draft_tokens"], arm["bonus"]): arm for arm in whole["measured"]["arms"]}
    assert set(arms) == {(num, bonus) for num in (1, 2, 4) for bonus in (True, False)}
    assert all(arm["tokens_agree"] and arm["speed_up_agrees"] for arm in arms.values())
    assert arms[1, False]["measured_speed_up"]["high"] < 1 < arms[1, True]["measured_speed_up"]["low"]
    assert arms[2, True]["expected_tokens"]["value"] < arms[2, True]["endless_tokens"]["value"]
    for planted, length in zip((0.85, 0.8, 0.75, 0.7), whole["lengths"], strict=False):
        assert length["acceptance"]["low"] - 0.01 <= planted <= length["acceptance"]["high"] + 0.01
    assert whole["draft_cost"] == pytest.approx(0.072, abs=0.005)
    assert whole["measured"]["backfill_cost"]["low"] > 0.02
    assert whole["lengths"][4]["is_extrapolated"]
    output = printed("speculation", results, "--draft-tokens", "1..4", "--plot", results / "law.png")
    assert "speed-up: law and measurement agree within their intervals, or 0.5%, in 6 of 6 arms" in output
    assert (results / "law.png").read_bytes().startswith(b"\x89PNG")


def test_the_measured_acceptance_is_carried_to_another_server(results: Path) -> None:
    load = law(results, *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,512")["load"]
    assert load["batches"][0]["points"][1]["speed_up"]["low"] is not None
    assert "DIR has the acceptance that was measured" in refusal("speculation", results, "--acceptance", "0.8")


MODEL = StepTimeModel(
    structure="overlap",
    coefficients=(
        Coefficient(name="compute", value=1.5),
        Coefficient(name="memory", value=1.2),
        Coefficient(name="steps", value=900.0, unit="us"),
    ),
    hardware="h100-sxm",
    tensor_parallel=(1,),
    provenance=Provenance(num_steps=50, most_query_tokens=1),
)
PROFILE = """
engine: {{kind: sim, options: {{cost_model: fitted, step_time_model: {file}, acceptance: 0.8, draft_cost: 0.05}}}}
model: qwen2.5-7b
blocks: 1
workload:
  dataset: synthetic
  input_len: 50
  output_len: 20
  num_prompts: 8
  arrival: {{kind: closed-loop, max_concurrency: 4}}
variants:
  baseline: {{}}
  drafts: {{server: {{num_speculative_tokens: 1}}}}
sweep:
  num_speculative_tokens: [1, 4]
allowed_differences: [server.num_speculative_tokens]
"""


def profile_with(directory: Path, most_query_tokens: int | None = 1) -> tuple[object, ...]:
    provenance = replace(MODEL.provenance, most_query_tokens=most_query_tokens)
    write_model(directory / "m.json", replace(MODEL, provenance=provenance))
    (directory / "p.yaml").write_text(PROFILE.format(file=directory / "m.json"), encoding="utf-8")
    return "--profile", directory / "p.yaml"


def has_warning(warnings: list[dict]) -> bool:
    return [warning["code"] for warning in warnings].count("drafts-not-fitted") == 1


def test_every_command_with_a_simulator_of_a_model_fitted_without_drafts_says_so_once(tmp_path: Path) -> None:
    profile = profile_with(tmp_path)
    plan = benchctl("run", *profile, "--dry-run", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert plan.stderr.count("fitted to steps of at most 1 query token for each decoding sequence") == 1
    assert "a verification of 4 draft tokens has 5" in plan.stderr
    assert has_warning(
        document("simulate", "sweep", *profile, "--max-concurrency", "1,2", cwd=tmp_path)["warnings"]
    )
    fitted = {"cost_model": "fitted", "step_time_model": str(tmp_path / "m.json")}
    with sim_server(tmp_path, **fitted, num_speculative_tokens=2, acceptance=0.8, draft_cost=0.1) as server:
        assert "a verification of 2 draft tokens has 3" in server.log.read_text(encoding="utf-8")
    for most, is_told in ((1, True), (None, True), (5, False)):
        shown = document("simulate", *profile_with(tmp_path, most), cwd=tmp_path)
        manifest = json.loads(Path(tmp_path, shown["directory"], "manifest.json").read_text(encoding="utf-8"))
        assert (has_warning(shown["warnings"]), has_warning(manifest["warnings"])) == (is_told, is_told)
