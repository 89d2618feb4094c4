"""``benchctl steptime``, ``benchctl speculation`` and what uses step-time models: plans and comparisons."""

import json
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import benchctl, document, printed, refusal
from support.peaks import gpu_peaks
from support.results.comparing import compare
from support.servers.simulator import sim_server
from support.step_time import MODELS, fitted_model, planted_run, write_table

from benchctl.costs.roofline import LAYER_OPERATIONS, STEP_OPERATIONS
from benchctl.records.peaks import PEAKS
from benchctl.report.page.plots import cell_waterfalls
from benchctl.steptime.model import HeldOutError, Provenance, write_model
from benchctl.steptime.work import Coefficient

PLANTED = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.2, "layers": 50.0, "requests": 12.0, "steps": 120.0}
MODEL = fitted_model(
    steps_us=5000.0,
    provenance=Provenance(
        runs=("a", "b", "c"),
        num_steps=1234,
        held_out=(HeldOutError(by="run", num_groups=3, num_steps=1234, mape_frac=0.034, bias_frac=-0.012),),
    ),
)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("tables")
    return [
        write_table(directory / f"{i}.csv", planted_run(*deployment, PLANTED, seed=i, noise=0.02, num_steps=60))
        for i, deployment in enumerate(MODELS)
    ]


@pytest.fixture(scope="module")
def model(tables: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.json"
    output = printed("steptime", "fit", *tables, "-o", path, "--picture", path.with_name("fit.png"))
    assert "overlap: 300 steps of 5 runs, qwen2.5-7b and qwen2.5-72b" in output
    assert "each run predicted by a fit to the others" in output
    assert path.with_name("fit.png").read_bytes().startswith(b"\x89PNG")
    return path


def test_fit_evaluate_and_diagnose_have_the_planted_coefficients_and_errors_on_unseen_runs(
    tables: list[Path], model: Path
) -> None:
    stored = json.loads(model.read_text(encoding="utf-8"))
    values = {coefficient["name"]: coefficient["value"] for coefficient in stored["coefficients"]}
    assert (values["memory"], values["compute"]) == pytest.approx((1.2, 1.6), rel=0.05)
    assert stored["provenance"]["held_out"][0]["mape_frac"] < 0.03
    assert stored["provenance"]["num_steps"] == 300
    alone = document("steptime", "fit", *tables, "--structure", "original")
    assert alone["held_out"][0] == document("steptime", "evaluate", *tables)["evaluations"][1]
    judged = document("steptime", "evaluate", *tables, "--hold-out", "model")
    assert [each["structure"] for each in judged["evaluations"]] == ["overlap", "original", "roofline"]
    assert set(judged["buckets"]) == {"model", "tensor parallel", "phase", "batch", "context"}
    assert {column["name"] for column in document("steptime", "diagnose", *tables)["columns"]} == set(PLANTED)
    assert "original" not in printed("steptime", "evaluate", *tables, "--fitted", model)


def test_predict_adds_a_step_up_with_its_interval_and_says_what_lies_outside_of_the_fit(model: Path) -> None:
    step = ("steptime", "predict", model, "--model", "qwen2.5-7b", "--context", 2000, "--batch")
    assert printed(*step, 8).startswith("qwen2.5-7b, TP1 on h100-sxm, 8 rows at context 2000: ")
    assert "outside of what was fitted: 2000 sequences, fitted 1 to " in printed(*step, 2000).splitlines()[0]
    near, far = (document(*step, batch) for batch in (32, 2000))
    assert (near["outside"], len(far["outside"])) == ([], 1)
    assert near["low_us"] < near["step_us"] < near["high_us"]
    prompt = ("steptime", "predict", model, "--model", "qwen2.5-7b", "--batch", 4, "--prefill", 512)
    cached = (*prompt, "--prompt-context", 4096)
    whole, rest = document(*prompt), document(*cached)
    assert rest["features"]["compute"] > whole["features"]["compute"]
    values = {each["name"]: each["value"] for each in json.loads(model.read_text(encoding="utf-8"))["coefficients"]}
    assert rest["step_us"] == pytest.approx(sum(values[name] * rest["features"][name] for name in values))
    first, *parts = printed(*cached).splitlines()
    assert "4 rows at context 1024 and a prompt of 512 tokens behind 4096: " in first
    summands = [re.match(r" *(\w+): .* is ([\d.]+)", part).groups() for part in parts[: len(values)]]
    assert [name for name, _ in summands] == list(values)
    assert sum(float(part_us) for _, part_us in summands) == pytest.approx(rest["step_us"], rel=1e-3)


def test_calibrate_writes_a_model_of_the_other_device(model: Path, tmp_path: Path) -> None:
    scaled = PLANTED | {"compute": 2.0, "memory": 1.08}
    run = planted_run("qwen2.5-7b", 1, scaled, seed=9, num_steps=30, hardware="a100-sxm")
    table = write_table(tmp_path / "a100.csv", run)
    output = printed("steptime", "calibrate", model, table, "-o", tmp_path / "a100.json")
    assert "from h100-sxm to a100-sxm: times bound by arithmetic times 1.2" in output
    assert json.loads((tmp_path / "a100.json").read_text(encoding="utf-8"))["hardware"] == "a100-sxm"


def test_bad_input_gets_one_message_with_the_remedy(tables: list[Path], model: Path) -> None:
    predict = ("predict", model, "--model", "qwen2.5-7b")
    for args, message in (
        ((*predict, "--tp", 8), "has 8; add a run with that size"),
        ((*predict, "--hardware", "a100-sxm"), "'benchctl steptime calibrate'"),
        ((*predict, "--prompt-context", 4096), "give its new tokens with --prefill"),
        (("predict", tables[0], "--model", "qwen2.5-7b"), "cannot be read as JSON"),
        (("fit", model), "neither a result directory nor a table of steps"),
        (("fit", tables[0], "--shape", "qwen"), "write NAME=DIR"),
        (("evaluate", tables[0]), "only one run"),
    ):
        assert message in refusal("steptime", *args)


OPERATIONS = 28 * LAYER_OPERATIONS + STEP_OPERATIONS
"""Of a guided step with the 28 layers of the 1.5B value model."""
ONE_ROW = ("--batch", "1", "--top-k", "5")


def floor_of(*options: str) -> dict:
    """The only row of the floor of guidance."""
    (row,) = document("steptime", "guided", *options)["rows"]
    return row


def test_the_goal_of_guidance_lies_just_above_its_floor_on_an_h200() -> None:
    """7B guided by 1.5B, 64 rows of 300 tokens, 5 candidates; the goal is 1.35."""
    again = floor_of("--batch", "64", "--top-k", "5", "--scoring", "recompute")
    reused = floor_of("--batch", "64", "--top-k", "5")
    assert (again["value_tokens"], reused["value_tokens"]) == (384, 320)
    assert (again["ratio"], reused["ratio"]) == pytest.approx((1.33, 1.28), abs=0.005)


def test_launches_and_peaks_count_as_they_are_stated_or_measured(tmp_path: Path, monkeypatch) -> None:
    eager = floor_of(*ONE_ROW, "--launch-us", "5")
    assert eager["step_s"] == pytest.approx(eager["base_s"] + OPERATIONS * 5e-6)
    slow = floor_of("--hardware", "own:100:1000", "--value-model", "Qwen2.5-1.5B-FP8", *ONE_ROW)
    assert slow["base_s"] == pytest.approx(14.16e9 / 1000e9, rel=0.001)
    monkeypatch.setenv(PEAKS.variable, str(tmp_path))
    PEAKS.add(gpu_peaks(host=platform.node(), read=3.1e12))
    row = floor_of(*ONE_ROW, "--launch-us", "measured", "--hardware", "measured")
    assert row["base_s"] == pytest.approx(14.16e9 / 3.1e12, rel=0.001)
    assert row["step_s"] == pytest.approx(row["base_s"] + OPERATIONS * 5e-6), "5 us were measured"


PLAN = """
engine: {engine}
model: qwen2.5-7b
{more}
blocks: 2
workload: {{dataset: synthetic, input_len: 200, output_len: 20, num_prompts: 60, arrival: {arrival}}}
variants: {{baseline: {{}}, other: {{sampling: {{temperature: 0}}}}}}
allowed_differences: [sampling.temperature]
"""
CLOSED = "{kind: closed-loop, max_concurrency: 4}"


@pytest.fixture(name="h100")
def _h100(tmp_path: Path) -> Path:
    write_model(tmp_path / "h100.json", MODEL)
    return tmp_path / "h100.json"


def planned(
    cwd: Path, *options: object, engine: str = "vllm", arrival: str = CLOSED, more: str = "", code: int = 0
):
    """What a dry run says on a machine without engines and without earlier runs."""
    (cwd / "plan.yaml").write_text(PLAN.format(engine=engine, arrival=arrival, more=more))
    nowhere = {"BENCHCTL_ENGINES_DIR": str(cwd / "engines"), "BENCHCTL_DURATIONS_DIR": str(cwd / "none")}
    done = benchctl("run", "--profile", "plan.yaml", "--dry-run", *options, cwd=cwd, **nowhere)
    assert done.returncode == code, done.stderr
    assert code or ("not to be measured on this machine" in done.stderr) == (engine != "sim")
    return done.stderr if code else done.stdout


def estimated_s(said: str) -> float:
    (seconds,) = re.findall(r"estimated duration(?: of the loads)? (\d+) s", said)
    return float(seconds)


def test_a_fitted_model_predicts_a_plan_and_says_how_far_it_has_been_off(tmp_path: Path, h100: Path) -> None:
    said = planned(tmp_path, "--step-time-model", h100)
    for text in (
        f"step times are those of {h100}, fitted to 1,234 steps of 3 runs",
        "where whole parts were left out of the fit (run) it was 3.4% off, -1.2% on average",
        "4 server starts come on top, unmeasured here",
        "load: 4.000 rows in a batch on average, 4 at most; step 1",
    ):
        assert text in said
    # 60 requests of 20 tokens, 4 at a time, make some 300 steps of 12 ms; four runs, and 3 s around them
    assert 4 * 300 * 0.011 + 3 < estimated_s(said) < 4 * 300 * 0.013 + 3
    in_profile = planned(tmp_path, more=f"step_time_model: {h100}\nhardware: NVIDIA H100 80GB HBM3")
    assert f"step times are those of {h100}" in in_profile
    roofline = planned(tmp_path, more="hardware: h100-sxm")
    assert "step times are the roofline of h100-sxm, below which no step can be" in roofline
    assert estimated_s(roofline) < estimated_s(said)


def test_step_times_of_a_plan_are_unknown_without_hardware_and_those_of_the_simulator_for_it(
    tmp_path: Path,
) -> None:
    assert "step times unknown: this machine has no GPU and the profile states no hardware" in planned(tmp_path)
    said = planned(tmp_path, engine="sim")
    assert ("step times are those of the simulator without" in said, "server start" in said) == (True, False)


def test_a_plan_tells_saturation_and_sequences_that_wait_for_a_row(tmp_path: Path, h100: Path) -> None:
    few, many = (
        planned(tmp_path, "--step-time-model", h100, arrival=f"{{kind: poisson, request_rate: {rate}}}")
        for rate in (2, 2000)
    )
    assert re.search(r"load: \d\.\d+ requests/s offered, \d\.\d+% of the \d+\.?\d* that the server completes", few)
    assert "load: saturated: " in many
    limited = planned(tmp_path, "--step-time-model", h100, engine="{kind: vllm, options: {max_num_seqs: 2}}")
    assert "sequences in the server, so that some wait for a row" in limited
    assert "2 at most" in limited


def test_a_model_of_another_hardware_is_refused_with_the_remedy(tmp_path: Path, h100: Path) -> None:
    for more, engine in (("hardware: a100-sxm", "vllm"), ("", "{kind: sim, options: {hardware: a100-sxm}}")):
        told = planned(tmp_path, "--step-time-model", h100, engine=engine, more=more, code=2)
        assert f"{h100}: a step-time model of h100-sxm, and this experiment runs on a100-sxm" in told
        assert "benchctl steptime calibrate" in told


BATCHES = """
engine: {kind: sim, options: {cost_model: roofline}}
model: qwen2.5-7b
step_time_model: gone.json
blocks: 2
workload:
  dataset: synthetic
  input_len: {mean: 200, cv: 0.5, min: 16}
  output_len: {mean: 30, cv: 0.5}
  num_prompts: 40
  arrival: {kind: closed-loop, max_concurrency: 16}
allowed_differences: [server.max_num_seqs]
variants: {baseline: {}, small: {server: {max_num_seqs: 4}}}
"""


@pytest.fixture(name="sides", scope="module")
def _sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two variants that differ in the largest batch, simulated at the roofline."""
    cwd = tmp_path_factory.mktemp("explain")
    (cwd / "batches.yaml").write_text(BATCHES)
    printed("simulate", "--profile", "batches.yaml", "-q", "-o", "r", cwd=cwd)
    return f"{cwd / 'r'}:baseline", f"{cwd / 'r'}:small"


def test_a_comparison_explains_the_change_by_the_model_by_which_the_steps_were_made(sides, tmp_path: Path) -> None:
    planted = tmp_path / "planted.json"
    roofline = (Coefficient(name="roofline", value=1.0),)
    write_model(planted, replace(MODEL, structure="roofline", coefficients=roofline))
    model = document("compare", *sides, "--step-time-model", planted, code=3)["cells"][0]["decomposition"]["model"]
    assert (model["source"], model["held_out_mape_frac"]) == (str(planted), 0.034)
    # The simulator also prices sampling, which is no work of the model.
    assert abs(model["parts"][-1]["added_s"]) < 0.05 * abs(model["whole"]["added_s"])
    output = printed("compare", *sides, "--all", "--step-time-model", planted, code=3)
    for words in ("prompts", "not explained by the work"):
        assert words in output
    for fall in cell_waterfalls(compare(*sides, step_time_model=planted).cells[0]):
        assert fall.start + sum(part.added for part in fall.falls) == pytest.approx(fall.end, rel=1e-6)
    assert "3.4% off on steps left out of its fit" in fall.sentence
    assert {"batch", "prompts"} & {part.label for part in fall.falls}


def test_a_comparison_without_a_model_that_fits_says_why_and_stops_only_for_one_that_was_named(
    sides, tmp_path: Path
) -> None:
    missing = document("compare", *sides, code=3)["cells"][0]["decomposition"]["model_missing"]
    assert "the step-time model of the profile cannot be used: gone.json" in missing
    path = tmp_path / "a100.json"
    write_model(path, replace(MODEL, hardware="a100-sxm"))
    told = refusal("compare", *sides, "--step-time-model", path)
    assert f"{path}: a step-time model of a100-sxm" in told


SERVER = ("--model", "qwen2.5-7b", "--hardware", "h100-sxm")


def law(*options: object) -> dict:
    return document("speculation", *options)


def test_the_table_has_the_law_at_every_draft_length_and_says_what_is_best_and_what_slower(tmp_path: Path) -> None:
    options = ("--acceptance", "0.8", "--draft-tokens", "1..5", "--draft-cost", "0.05")
    output = printed("speculation", *options, "--plot", tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    (line,) = [line for line in output.splitlines() if line.lstrip().startswith("5 ")]
    assert line.split()[:7] == ["5", "0.8000", "0.3277", "3.689", "3.362", "1.097", "2.951"]
    assert "8 draft tokens are best: 3.092 times as fast" in output
    output = printed("speculation", "--acceptance", "0.9", "--no-bonus", "--draft-tokens", "1,2")
    assert "without bonus tokens, a step with 1 draft token yields 4.76% less per second" in output


def test_a_backfill_that_costs_its_limit_makes_bonus_tokens_worth_nothing() -> None:
    limit = law("--acceptance", "0.8")["lengths"][1]["backfill_limit"]["value"]
    length = law("--acceptance", "0.8", "--backfill-cost", limit)["lengths"][1]
    assert length["speed_up"]["value"] == pytest.approx(length["speed_up_without_bonus"]["value"])


def test_counters_and_fractions_give_the_same_intervals() -> None:
    of_counters = law("--drafts", "100", "--accepted", "80,60")
    assert of_counters == law("--acceptance", "80/100,60/80")
    assert of_counters["lengths"][0]["tokens"]["low"] < 1.8 < of_counters["lengths"][0]["tokens"]["high"]


def test_step_times_of_two_models_replace_the_constants_and_a_rate_of_requests_adds_latency() -> None:
    both = law("--acceptance", "0.8", *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,64,1024")
    (single, _, large) = both["load"]["batches"]
    assert both["draft_cost"] == pytest.approx(0.0705, abs=5e-4)
    of_law = [length["speed_up"]["value"] for length in both["lengths"]]
    assert [point["speed_up"]["value"] for point in single["points"][1:]] == pytest.approx(of_law, rel=0.01)
    assert large["best_num_draft_tokens"] < single["best_num_draft_tokens"]
    loads = law("--acceptance", "0.8", *SERVER, "--rate", "1,40")["load"]["rates"][0]["loads"]
    assert loads[0]["e2el_s"] > loads[4]["e2el_s"]


def fitted_file(directory: Path, num_draft_tokens: int = 0) -> Path:
    """A model fitted to planted steps in which each decoding row verifies so many drafts."""
    size = {"noise": 0.02, "num_steps": 30, "row_tokens": num_draft_tokens + 1}
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
    assert "at most 1 query token for each decoding sequence" in warning["message"]
    assert "a verification of 4 draft tokens has 5" in warning["message"]
    assert f"warning: {warning['message']}" in printed("speculation", *server)
    load = law(*target, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,8")["load"]
    # Launches of its 24 layers make a pass of the small draft dear: fewer drafts are best than at the roofline.
    roofline = law("--acceptance", "0.8", *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1")
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


def test_a_simulated_sweep_agrees_with_the_law_and_has_the_planted_acceptance_and_costs(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP, encoding="utf-8")
    results = tmp_path / "r"
    printed("simulate", "--profile", "sweep.yaml", "--quiet", "-o", "r", cwd=tmp_path)
    whole = law(results)
    arms = {(arm["num_draft_tokens"], arm["bonus"]): arm for arm in whole["measured"]["arms"]}
    assert set(arms) == {(num, bonus) for num in (1, 2, 4) for bonus in (True, False)}
    assert all(arm["tokens_agree"] and arm["speed_up_agrees"] for arm in arms.values())
    assert arms[1, False]["measured_speed_up"]["high"] < 1 < arms[1, True]["measured_speed_up"]["low"]
    for planted, length in zip((0.85, 0.8, 0.75, 0.7), whole["lengths"], strict=False):
        assert length["acceptance"]["low"] - 0.01 <= planted <= length["acceptance"]["high"] + 0.01
    assert whole["draft_cost"] == pytest.approx(0.072, abs=0.005)
    assert whole["measured"]["backfill_cost"]["low"] > 0.02
    assert whole["lengths"][4]["is_extrapolated"]
    output = printed("speculation", results, "--draft-tokens", "1..4", "--plot", results / "law.png")
    assert "speed-up: law and measurement agree within their intervals, or 0.5%, in 6 of 6 arms" in output
    assert (results / "law.png").read_bytes().startswith(b"\x89PNG")
    load = law(results, *SERVER, "--draft-model", "qwen2.5-0.5b", "--batch-size", "1,512")["load"]
    assert load["batches"][0]["points"][1]["speed_up"]["low"] is not None
    assert "DIR has the acceptance that was measured" in refusal("speculation", results, "--acceptance", "0.8")


PROFILE = """
engine: {{kind: sim, options: {{cost_model: fitted, step_time_model: {file}, acceptance: 0.8, draft_cost: 0.05}}}}
model: qwen2.5-7b
blocks: 1
workload:
  dataset: synthetic
  input_len: 50
  output_len: 8
  num_prompts: 4
  arrival: {{kind: closed-loop, max_concurrency: 2}}
variants:
  baseline: {{}}
  drafts: {{server: {{num_speculative_tokens: 1}}}}
sweep:
  num_speculative_tokens: [1, 4]
allowed_differences: [server.num_speculative_tokens]
"""


def profile_with(directory: Path, most_query_tokens: int | None = 1) -> tuple[object, ...]:
    provenance = Provenance(num_steps=50, most_query_tokens=most_query_tokens)
    write_model(directory / "m.json", fitted_model(steps_us=900.0, provenance=provenance))
    (directory / "p.yaml").write_text(PROFILE.format(file=directory / "m.json"), encoding="utf-8")
    return "--profile", directory / "p.yaml"


def has_warning(warnings: list[dict]) -> bool:
    return [warning["code"] for warning in warnings].count("drafts-not-fitted") == 1


def test_every_command_with_a_simulator_of_a_model_fitted_without_drafts_says_so_once(tmp_path: Path) -> None:
    profile = profile_with(tmp_path)
    plan = benchctl("run", *profile, "--dry-run", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert plan.stderr.count("fitted to steps of at most 1 query token for each decoding sequence") == 1
    swept = document("simulate", "sweep", *profile, "--max-concurrency", "2", "--jobs", 1, cwd=tmp_path)
    assert has_warning(swept["warnings"])
    fitted = {"cost_model": "fitted", "step_time_model": str(tmp_path / "m.json")}
    with sim_server(tmp_path, **fitted, num_speculative_tokens=2, acceptance=0.8, draft_cost=0.1) as server:
        assert "a verification of 2 draft tokens has 3" in server.log.read_text(encoding="utf-8")
    for most, is_told in ((1, True), (None, True), (5, False)):
        shown = document("simulate", *profile_with(tmp_path, most), cwd=tmp_path)
        manifest = json.loads(Path(tmp_path, shown["directory"], "manifest.json").read_text(encoding="utf-8"))
        assert (has_warning(shown["warnings"]), has_warning(manifest["warnings"])) == (is_told, is_told)
