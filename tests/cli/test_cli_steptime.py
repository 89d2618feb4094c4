"""``benchctl steptime`` from the command line: fit, judge, predict, carry over, diagnose, and every refusal."""

import json
from pathlib import Path

import pytest
from support.cli import benchctl
from support.step_time import MODELS, planted_run, write_table

PLANTED = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.2, "layers": 50.0, "requests": 12.0, "steps": 120.0}


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
    fitted = benchctl("steptime", "fit", *tables, "-o", path)
    assert fitted.returncode == 0, fitted.stderr
    return path


def test_fit_prints_the_planted_coefficients_and_errors_on_unseen_runs(tables: list[Path], tmp_path: Path) -> None:
    fitted = benchctl("steptime", "fit", *tables, "-o", tmp_path / "m.json", "--picture", tmp_path / "fit.png")
    assert fitted.returncode == 0, fitted.stderr
    assert "overlap: 600 steps of 5 runs, qwen2.5-7b and qwen2.5-72b" in fitted.stdout
    assert "each run predicted by a fit to the others" in fitted.stdout
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    values = {c["name"]: c["value"] for c in document["coefficients"]}
    assert values["memory"] == pytest.approx(1.2, rel=0.05)
    assert values["compute"] == pytest.approx(1.6, rel=0.05)
    assert document["provenance"]["held_out"][0]["mape_frac"] < 0.03


def test_the_json_of_fit_evaluate_and_diagnose_has_what_the_tables_show(tables: list[Path]) -> None:
    fitted = json.loads(benchctl("steptime", "fit", *tables, "--json").stdout)
    assert fitted["model"]["provenance"]["num_steps"] == 600
    assert fitted["held_out"][0]["by"] == "run"
    judged = json.loads(benchctl("steptime", "evaluate", *tables, "--hold-out", "model", "--json").stdout)
    assert [each["structure"] for each in judged["evaluations"]] == ["overlap", "original", "roofline"]
    assert set(judged["buckets"]) == {"model", "tensor parallel", "phase", "batch", "context"}
    diagnosis = json.loads(benchctl("steptime", "diagnose", *tables, "--json").stdout)
    assert {column["name"] for column in diagnosis["columns"]} == set(PLANTED)


def test_evaluate_judges_a_model_file_too(tables: list[Path], model: Path) -> None:
    judged = benchctl("steptime", "evaluate", *tables, "--fitted", model)
    assert judged.returncode == 0, judged.stderr
    assert "original" not in judged.stdout


def test_predict_states_a_step_with_its_interval(model: Path) -> None:
    predicted = benchctl("steptime", "predict", model, "--model", "qwen2.5-7b", "--batch", 8, "--context", 2000)
    assert predicted.returncode == 0, predicted.stderr
    assert predicted.stdout.startswith("qwen2.5-7b, TP1 on h100-sxm, 8 rows at context 2000: ")
    one = ("steptime", "predict", model, "--model", "qwen2.5-7b", "--prefill", 512, "--batch", 0, "--json")
    document = json.loads(benchctl(*one).stdout)
    assert document["low_us"] < document["step_us"] < document["high_us"]


def test_predict_adds_a_step_up_from_its_features_and_takes_a_prompt_that_is_partly_in_the_cache(
    model: Path,
) -> None:
    step = ("steptime", "predict", model, "--model", "qwen2.5-7b", "--batch", 4, "--prefill", 512)
    behind = (*step, "--prompt-context", 4096)
    whole, rest = (json.loads(benchctl(*words, "--json").stdout) for words in (step, behind))
    assert rest["features"]["compute"] > whole["features"]["compute"]
    values = {each["name"]: each["value"] for each in json.loads(model.read_text(encoding="utf-8"))["coefficients"]}
    assert rest["step_us"] == pytest.approx(sum(values[name] * rest["features"][name] for name in values))
    first, *parts = benchctl(*behind).stdout.splitlines()
    assert "4 rows at context 1024 and a prompt of 512 tokens behind 4096: " in first
    assert [part.split(":")[0].strip() for part in parts[: len(values)]] == list(values)
    assert sum(float(part.split(" is ")[1].split()[0]) for part in parts[: len(values)]) == pytest.approx(
        rest["step_us"], rel=1e-3
    )
    refused = benchctl(*step[:-2], "--prompt-context", 4096)
    assert (refused.returncode, "give its new tokens with --prefill" in refused.stderr) == (2, True)


def test_predict_says_what_lies_outside_of_the_steps_of_the_fit(model: Path) -> None:
    step = ("steptime", "predict", model, "--model", "qwen2.5-7b", "--context", 2000)
    assert "outside" not in benchctl(*step, "--batch", 32).stdout
    first = benchctl(*step, "--batch", 2000).stdout.splitlines()[0]
    assert "outside of what was fitted: 2000 sequences, fitted 1 to " in first
    inside, far = (json.loads(benchctl(*step, "--batch", batch, "--json").stdout) for batch in (32, 2000))
    assert (inside["outside"], len(far["outside"])) == ([], 1)


def test_the_published_form_has_the_same_errors_by_itself_and_beside_another(tables: list[Path]) -> None:
    alone = json.loads(benchctl("steptime", "fit", *tables, "--structure", "original", "--json").stdout)
    beside = json.loads(benchctl("steptime", "evaluate", *tables, "--json").stdout)
    assert alone["held_out"][0] == beside["evaluations"][1]


def test_a_diagnosis_without_warnings_does_not_call_determined_what_it_notes_as_typical(tables: list[Path]) -> None:
    diagnosed = benchctl("steptime", "diagnose", tables[0]).stdout
    assert "is a typical value and not measured" in diagnosed
    assert "Runs to add" in diagnosed
    assert "nothing to add" not in diagnosed
    assert "coefficients are determined" not in diagnosed


def test_calibrate_writes_a_model_of_the_other_device(model: Path, tmp_path: Path) -> None:
    scaled = PLANTED | {"compute": 2.0, "memory": 1.08}
    run = planted_run("qwen2.5-7b", 1, scaled, seed=9, num_steps=30, hardware="a100-sxm")
    table = write_table(tmp_path / "a100.csv", run)
    carried = benchctl("steptime", "calibrate", model, table, "-o", tmp_path / "a100.json")
    assert carried.returncode == 0, carried.stderr
    assert "from h100-sxm to a100-sxm: times bound by arithmetic times 1.2" in carried.stdout
    assert json.loads((tmp_path / "a100.json").read_text(encoding="utf-8"))["hardware"] == "a100-sxm"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("predict", "MODEL", "--model", "qwen2.5-7b", "--tp", 8), "has 8; add a run with that size"),
        (("predict", "MODEL", "--model", "qwen2.5-7b", "--hardware", "a100-sxm"), "'benchctl steptime calibrate'"),
        (("predict", "TABLE", "--model", "qwen2.5-7b"), "cannot be read as JSON"),
        (("fit", "MODEL"), "neither a result directory nor a table of steps"),
        (("fit", "TABLE", "--shape", "qwen"), "write NAME=DIR"),
        (("evaluate", "TABLE"), "only one run"),
    ],
    ids=["tp", "hardware", "not-a-model", "not-a-source", "shape", "one-run"],
)
def test_bad_input_gets_one_message_with_the_remedy_and_exit_code_2(
    args: tuple[object, ...], message: str, tables: list[Path], model: Path
) -> None:
    stands_for = {"MODEL": model, "TABLE": tables[0]}
    refused = benchctl("steptime", *(stands_for.get(str(arg), arg) for arg in args))
    assert refused.returncode == 2
    assert message in refused.stderr
    assert refused.stderr.startswith("benchctl: ")
    assert "Traceback" not in refused.stderr
    assert not refused.stdout
