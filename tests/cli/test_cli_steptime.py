"""``benchctl steptime`` and what uses its models: fit, judge, predict, carry over, diagnose, plan, explain."""

import json
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import benchctl, document, printed, refusal
from support.peaks import gpu_peaks
from support.step_time import MODELS, fitted_model, planted_run, write_table

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
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
        write_table(directory / f"{i}.csv", planted_run(*deployment, PLANTED, seed=i, noise=0.02, num_steps=120))
        for i, deployment in enumerate(MODELS)
    ]


@pytest.fixture(scope="module")
def model(tables: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.json"
    output = printed("steptime", "fit", *tables, "-o", path, "--picture", path.with_name("fit.png"))
    assert "overlap: 600 steps of 5 runs, qwen2.5-7b and qwen2.5-72b" in output
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
    assert stored["provenance"]["num_steps"] == 600
    judged = document("steptime", "evaluate", *tables, "--hold-out", "model")
    assert [each["structure"] for each in judged["evaluations"]] == ["overlap", "original", "roofline"]
    assert set(judged["buckets"]) == {"model", "tensor parallel", "phase", "batch", "context"}
    assert {column["name"] for column in document("steptime", "diagnose", *tables)["columns"]} == set(PLANTED)
    assert "original" not in printed("steptime", "evaluate", *tables, "--fitted", model)


def test_predict_states_a_step_with_its_interval_and_says_what_lies_outside_of_the_fit(model: Path) -> None:
    step = ("steptime", "predict", model, "--model", "qwen2.5-7b", "--context", 2000, "--batch")
    inside = printed(*step, 8)
    assert inside.startswith("qwen2.5-7b, TP1 on h100-sxm, 8 rows at context 2000: ")
    assert "outside" not in inside
    assert "outside of what was fitted: 2000 sequences, fitted 1 to " in printed(*step, 2000).splitlines()[0]
    near, far = (document(*step, batch) for batch in (32, 2000))
    assert (near["outside"], len(far["outside"])) == ([], 1)
    assert near["low_us"] < near["step_us"] < near["high_us"]


def test_predict_adds_a_step_up_from_its_features_and_takes_a_prompt_that_is_partly_in_the_cache(
    model: Path,
) -> None:
    step = ("steptime", "predict", model, "--model", "qwen2.5-7b", "--batch", 4, "--prefill", 512)
    behind = (*step, "--prompt-context", 4096)
    whole, rest = (document(*words) for words in (step, behind))
    assert rest["features"]["compute"] > whole["features"]["compute"]
    values = {each["name"]: each["value"] for each in json.loads(model.read_text(encoding="utf-8"))["coefficients"]}
    assert rest["step_us"] == pytest.approx(sum(values[name] * rest["features"][name] for name in values))
    first, *parts = printed(*behind).splitlines()
    assert "4 rows at context 1024 and a prompt of 512 tokens behind 4096: " in first
    printed_us = {
        part.split(":")[0].strip(): float(part.split(" is ")[1].split()[0]) for part in parts[: len(values)]
    }
    assert list(printed_us) == list(values)
    assert sum(printed_us.values()) == pytest.approx(rest["step_us"], rel=1e-3)


def test_the_published_form_has_the_same_errors_by_itself_and_beside_another(tables: list[Path]) -> None:
    alone = document("steptime", "fit", *tables, "--structure", "original")
    assert alone["held_out"][0] == document("steptime", "evaluate", *tables)["evaluations"][1]


def test_a_diagnosis_without_warnings_does_not_call_determined_what_it_notes_as_typical(tables: list[Path]) -> None:
    diagnosed = printed("steptime", "diagnose", tables[0])
    assert "is a typical value and not measured" in diagnosed
    assert "Runs to add" in diagnosed
    assert not any(text in diagnosed for text in ("nothing to add", "coefficients are determined"))


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
        told = refusal("steptime", *args)
        assert message in told
        assert told.startswith("benchctl: ")


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


def test_the_table_of_floors_has_a_line_for_each_batch_and_top_k_and_says_what_it_is() -> None:
    output = printed("steptime", "guided", "--batch", "8,64", "--top-k", "5,2")
    lines = [line.split() for line in output.splitlines()]
    assert [line[:2] for line in lines[2:6]] == [["8", "2"], ["8", "5"], ["64", "2"], ["64", "5"]]
    for text in (
        *("h200-sxm, context 300, scoring reuse", "a floor and no prediction"),
        f"without graphs the host launches {OPERATIONS} operations, which --launch-us prices",
    ):
        assert text in output
    assert "--launch-us prices" not in printed("steptime", "guided", *ONE_ROW, "--launch-us", "5")


def test_launches_and_peaks_count_as_they_are_stated_or_measured(tmp_path: Path, monkeypatch) -> None:
    replayed, eager = floor_of(*ONE_ROW), floor_of(*ONE_ROW, "--launch-us", "5")
    assert replayed["launches_s"] == 0
    assert eager["step_s"] == pytest.approx(eager["base_s"] + OPERATIONS * 5e-6)
    slow = floor_of("--hardware", "own:100:1000", "--value-model", "Qwen2.5-1.5B-FP8", *ONE_ROW)
    assert slow["base_s"] == pytest.approx(14.16e9 / 1000e9, rel=0.001)
    assert slow["parts"]["weights"] == pytest.approx(0.0927, abs=0.001)
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
    said = planned(tmp_path)
    assert "duration unknown" in said
    assert "step times unknown: this machine has no GPU and the profile states no hardware" in said
    said = planned(tmp_path, engine="sim")
    assert "step times are those of the simulator without its noise" in said
    assert "server start" not in said


def test_a_plan_tells_saturation_and_sequences_that_wait_for_a_row(tmp_path: Path, h100: Path) -> None:
    few, many = (
        planned(tmp_path, "--step-time-model", h100, arrival=f"{{kind: poisson, request_rate: {rate}}}")
        for rate in (2, 2000)
    )
    assert re.search(r"load: \d\.\d+ requests/s offered, \d\.\d+% of the \d+\.?\d* that the server completes", few)
    assert "in the server on average" in few
    assert "load: saturated: " in many
    assert "so the queue grows while the load lasts" in many
    limited = planned(tmp_path, "--step-time-model", h100, engine="{kind: vllm, options: {max_num_seqs: 2}}")
    assert "sequences in the server, so that some wait for a row" in limited
    assert "2 at most" in limited


@pytest.mark.parametrize(
    ("more", "engine"), [("hardware: a100-sxm", "vllm"), ("", "{kind: sim, options: {hardware: a100-sxm}}")]
)
def test_a_model_of_another_hardware_is_refused_with_the_remedy(tmp_path: Path, h100: Path, more, engine) -> None:
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
    rows = "\n".join(line for line in output.splitlines() if "of the step (step-time model)" in line)
    assert "prompts" in rows
    assert "not explained by the work" in rows
    assert "a step-time model explains" in output
    comparison = compare_sides(*map(parse_side, sides), CompareOptions(step_time_model=planted))
    falls = list(cell_waterfalls(comparison.cells[0]))
    assert [fall.unit for fall in falls[:2]] == ["s", "ms"]
    for fall in falls:
        assert fall.start + sum(part.added for part in fall.falls) == pytest.approx(fall.end, rel=1e-6)
    assert fall.title.endswith("by its work")
    assert "3.4% off on steps left out of its fit" in fall.sentence
    assert {"batch", "prompts"} & {part.label for part in fall.falls}


def test_a_comparison_without_a_model_that_fits_says_why_and_stops_only_for_one_that_was_named(
    sides, tmp_path: Path
) -> None:
    decomposition = document("compare", *sides, code=3)["cells"][0]["decomposition"]
    assert decomposition["model"] is None
    assert "the step-time model of the profile cannot be used: gone.json" in decomposition["model_missing"]
    path = tmp_path / "a100.json"
    write_model(path, replace(MODEL, hardware="a100-sxm"))
    told = refusal("compare", *sides, "--step-time-model", path)
    assert f"{path}: a step-time model of a100-sxm" in told
    assert "benchctl steptime calibrate" in told
