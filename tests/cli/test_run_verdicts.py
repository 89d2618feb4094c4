"""The end of ``benchctl run``: verdicts, page and next commands, on real runs of the simulator."""

import json
import shlex
from pathlib import Path

import pytest
from support.cli import benchctl, only_result

pytestmark = pytest.mark.slow
SMALL = ["workload.num_prompts=2", "workload.output_len=24", "engine.options.time_scale=20", "gates=[]"]
OPTIONS = ["--engine", "sim-exact", "--quiet", *(word for override in SMALL for word in ("--set", override))]


@pytest.fixture(scope="module", name="screening")
def _screening(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], str]:
    """Two blocks, what ``run --json`` printed, and its stderr."""
    cwd = tmp_path_factory.mktemp("screening")
    done = benchctl("run", "ci-smoke", *OPTIONS, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return only_result(cwd), json.loads(done.stdout), done.stderr


def line_after(text: str, begin: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(begin)]
    return line.removeprefix(begin).strip()


def test_the_json_of_a_run_is_one_document_and_everything_else_is_on_stderr(
    screening: tuple[Path, dict[str, object], str],
) -> None:
    path, document, stderr = screening
    assert path == path.parents[2] / str(document["directory"])
    assert (path.parents[2] / str(document["page"])).stat().st_size > 0
    assert document["runs"] == {"done": 4, "suspect": 0, "failed": 0, "done_before": 0}
    assert (document["state"], document["exit_code"], document["verdict"]) == ("done", 0, "inconclusive")
    assert "dataset-substituted" in {warning["code"] for warning in document["warnings"]}  # type: ignore[attr-defined]
    for printed in ("results in ", "runs: 4 done", "Verdicts against baseline", "page: "):
        assert printed in stderr


def test_the_verdicts_of_a_run_are_those_of_compare_and_its_commands_work(
    screening: tuple[Path, dict[str, object], str],
) -> None:
    path, document, stderr = screening
    cwd = path.parents[2]
    commands = document["commands"]
    assert isinstance(commands, dict)
    assert line_after(stderr, "compare:") == commands["compare"]
    program, *arguments = shlex.split(commands["compare"])
    compared = benchctl(*arguments, "--json", cwd=cwd)
    assert (program, compared.returncode) == ("benchctl", document["verdict_exit_code"])
    whole = json.loads(compared.stdout)
    (comparison,), (verdict,) = whole["comparisons"], document["verdicts"]  # type: ignore[misc]
    of_compare = {m["name"]: (m["ratio"], m["ci_low"], m["ci_high"]) for m in comparison["metrics"]}
    assert verdict["changes"]
    for change in verdict["changes"]:
        assert (change["ratio"], change["ci_low"], change["ci_high"]) == of_compare[change["metric"]]
    assert f"{verdict['arm']}  {verdict['sentence']}" in stderr
    assert "screening: 2 blocks give no verdict" in stderr
    last = line_after(stderr, "screening; a verdict takes at least 6 blocks")
    assert last.endswith(f": {commands['more_blocks']}")
    assert commands["more_blocks"] == f"benchctl run --resume {document['directory']} --blocks 6"


def test_a_directory_alone_is_compared_as_its_two_sides_are(
    screening: tuple[Path, dict[str, object], str],
) -> None:
    path, _, _ = screening
    alone, one = benchctl("compare", path, "--json"), benchctl("compare", f"{path}:guided", "--json")
    both = benchctl("compare", f"{path}:baseline", f"{path}:guided", "--json")
    (comparison,) = json.loads(alone.stdout)["comparisons"]
    assert not comparison.pop("is_control")
    assert comparison.pop("sides") == "guided against baseline"
    assert comparison == json.loads(both.stdout) == json.loads(one.stdout)
    assert alone.returncode == both.returncode == one.returncode == 3


def test_no_verdict_is_printed_where_every_run_failed(tmp_path: Path) -> None:
    broken = ["--set", "engine.options.start_delay_s=30", "--set", "timeouts.ready_s=0.5"]
    done = benchctl("run", "ci-smoke", *OPTIONS, *broken, "--blocks", "1", cwd=tmp_path)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert "Verdicts" not in done.stdout
    assert "page: " in done.stdout
    assert "compare: " not in done.stdout


def test_the_name_of_a_profile_is_an_argument_or_an_option(tmp_path: Path) -> None:
    plans = [
        benchctl("run", *named, "--dry-run", cwd=tmp_path)
        for named in (["ci-smoke"], ["--profile", "ci-smoke"], ["ci-smoke", "-p", "ci-smoke"])
    ]
    assert [plan.returncode for plan in plans] == [0, 0, 0]
    assert len({plan.stdout for plan in plans}) == 1
    one = benchctl("run", "ci-smoke", "--dry-run", "--blocks", "1", "--set", "workload.num_prompts=1", cwd=tmp_path)
    assert "2 runs in 1 block of 2, 1 request each" in one.stdout


def test_output_names_the_result_directory_itself(tmp_path: Path) -> None:
    done = benchctl("run", "ci-smoke", *OPTIONS, "--blocks", "1", "-o", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "manifest.json").is_file()
    assert not (tmp_path / "results").exists()
    again = benchctl("run", "ci-smoke", *OPTIONS, "--blocks", "1", "-o", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert "mine: is not empty" in again.stderr
