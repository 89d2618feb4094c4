"""``benchctl compare DIR``: every variant against the baseline, with the numbers and the verdict of the page."""

import csv
import json
import re
from pathlib import Path

import pytest
from support.cli import benchctl, only_result

from benchctl.cli.commands.compare import SUFFIXES
from benchctl.cli.screen import PICTURE_SUFFIXES

SMALL = ["--set", "workload.num_prompts=2", "--set", "workload.output_len=16", "--set", "gates=[]"]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder of controls in virtual time: four variants beside the baseline, three of them controls."""
    cwd = tmp_path_factory.mktemp("controls")
    done = benchctl("simulate", "--profile", "controls", "--engine", "sim-exact", "--blocks", "6", *SMALL, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return only_result(cwd)


def data_of(page: Path) -> dict[str, object]:
    found = re.search(r'<script[^>]*id="benchctl-data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_verdict_exit_code_and_numbers_are_those_of_the_page(path: Path) -> None:
    done = benchctl("compare", path, "--json")
    document, page = json.loads(done.stdout), data_of(path / "report.html")
    assert page["verdict"] == {key: document[key] for key in ("verdict", "exit_code", "summary")}
    assert done.returncode == document["exit_code"] == 1
    first, *others = [(one["b"], one["is_control"]) for one in document["comparisons"]]
    assert first == ("guided", False)
    assert sorted(others) == [(f"guided-{control}", True) for control in ("flags", "idle", "neutral")]
    plain = [{k: v for k, v in one.items() if k not in {"is_control", "sides"}} for one in document["comparisons"]]
    assert plain == page["comparisons"]


def test_the_table_names_every_comparison_and_controls_decide_nothing(path: Path) -> None:
    done = benchctl("compare", path)
    for name in ("guided", "guided-neutral", "guided-flags", "guided-idle"):
        assert f": {name} against baseline: " in done.stdout
    assert done.stdout.count("control, which decides nothing:") == 3
    assert done.stdout.startswith("regression: ")


def test_every_form_of_output_holds_every_comparison(path: Path, tmp_path: Path) -> None:
    files = {suffix: tmp_path / f"c{suffix}" for suffix in SUFFIXES if suffix not in PICTURE_SUFFIXES}
    done = benchctl("compare", path, *(word for file in files.values() for word in ("-o", file)))
    assert done.returncode == 1, done.stderr
    assert len(json.loads(files[".json"].read_text())["comparisons"]) == 4
    sides = {row["sides"] for row in csv.DictReader(files[".csv"].read_text().splitlines())}
    assert sides == {
        f"{name} against baseline" for name in ("guided", "guided-neutral", "guided-flags", "guided-idle")
    }
    assert files[".md"].read_text().count("against baseline: ") >= 4
    assert len(data_of(files[".html"])["comparisons"]) == 4  # type: ignore[arg-type]
    picture = benchctl("compare", path, "-o", tmp_path / "c.png")
    assert picture.returncode == 2
    assert "a picture shows one comparison" in picture.stderr


def test_the_worst_verdict_is_that_of_the_whole(path: Path) -> None:
    """Not comparable before regression: the numbers of the first cannot be trusted at all."""
    run = next((path / "runs").glob("*-guided-neutral*")) / "requests.jsonl"
    whole = run.read_bytes()
    run.write_bytes(whole[:-30])
    try:
        done = benchctl("compare", path, "--json")
    finally:
        run.write_bytes(whole)
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (4, "invalid")


def test_a_directory_with_the_baseline_alone_is_an_error_of_usage(tmp_path: Path) -> None:
    alone = ["--set", "variants.guided=null", "--set", "allowed_differences=[]", "--set", "sweep.top_k=null"]
    begun = benchctl("simulate", "--profile", "ci-smoke", "--blocks", "1", *SMALL, *alone, cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert "compare: " not in begun.stdout
    done = benchctl("compare", only_result(tmp_path))
    assert done.returncode == 2
    assert "only baseline was planned" in done.stderr
