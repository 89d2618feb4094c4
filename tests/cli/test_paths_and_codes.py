"""One meaning for each option of a path, and one exit code for each kind of mistake, over all commands."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from generate import command_reference
from support.cli import benchctl
from support.results.builders import write_results

if TYPE_CHECKING:
    import subprocess

DIRECTORY_COMMANDS = (
    "show {}",
    "report {}",
    "report {} {}",
    "export {} --format vllm",
    "verify {}",
    "compare {}",
    "compare {} {}",
    "compare {}:baseline {}:guided",
    "run --resume {}",
    "run --resume {} --blocks 9",
    "noise add {}",
    "speculation {}",
    "steptime fit {}",
    "steptime evaluate {} --model m.json",
    "steptime diagnose {}",
)
OTHER_NAMES = (
    "run no-profile",
    "run no-profile.yaml",
    "run ci-smoke --profile aa",
    "run ci-smoke --engine no-engine",
    "simulate --profile no-profile",
    "profiles show no-profile",
    "profiles validate no-profile",
    "list no-directory",
    "import lenvm no-directory",
    "noise show no-key",
    "noise remove no-key",
    "steptime predict --model no-file.json",
    "speculation --step-time-model no-file.json",
    "workloads lint no-file.yml",
    "compare r:no-variant",
    "compare r:baseline r:no-variant",
    "compare r --metrics no-metric",
    "compare r:baseline r:guided --metrics no-metric",
    "compare r --noise-floor no-directory",
    "compare r --step-time-model no-file.json",
    "compare r -o no-directory/c.json",
    "report r r:no-variant",
    "export r --format no-format",
)


@pytest.fixture(name="cwd", scope="module")
def _cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result directory, an empty one, a file, and results without a manifest and with a damaged record."""
    cwd = tmp_path_factory.mktemp("paths")
    for name in ("r", "without-manifest", "damaged"):
        write_results(cwd / name, block_factors=({"baseline": 1.0, "guided": 1.1},) * 2)
    (cwd / "without-manifest" / "manifest.json").unlink()
    (cwd / "damaged" / "manifest.json").write_text("{")
    (cwd / "empty").mkdir()
    (cwd / "file").write_text("no results\n")
    return cwd


def ended(cwd: Path, line: str) -> "subprocess.CompletedProcess[str]":
    done = benchctl(*line.split(), cwd=cwd, BENCHCTL_NOISE_DIR=str(cwd / "noise"))
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    return done


@pytest.mark.parametrize("name", ["nowhere", "empty"])
@pytest.mark.parametrize("command", DIRECTORY_COMMANDS)
def test_a_directory_that_holds_no_results_is_an_error_of_usage(cwd: Path, command: str, name: str) -> None:
    done = ended(cwd, command.format(name, name))
    assert done.returncode == 2, done.stdout + done.stderr
    assert name in done.stderr


@pytest.mark.parametrize("name", ["without-manifest", "damaged"])
@pytest.mark.parametrize("command", [command for command in DIRECTORY_COMMANDS if "steptime" not in command])
def test_damaged_results_are_invalid_data(cwd: Path, command: str, name: str) -> None:
    done = ended(cwd, command.format(name, name))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "manifest.json" in done.stderr


@pytest.mark.parametrize("line", OTHER_NAMES)
def test_an_unknown_name_is_an_error_of_usage(cwd: Path, line: str) -> None:
    done = ended(cwd, line)
    assert done.returncode == 2, done.stdout + done.stderr


def test_the_short_option_o_is_output_in_every_command() -> None:
    """``-o`` never stands for a parent directory, or for an option of another name."""
    rows = re.findall(r"^\| `([^`]*--?o[^`]*)` \| (.*) \|$", command_reference(), re.MULTILINE)
    short = [names for names, _ in rows if re.search(r"(^|[ ,])-o\b", names)]
    assert len(short) > 8
    assert [names for names in short if "--output" not in names.replace("--output-", "")] == []
    parents = [meaning for names, meaning in rows if names.startswith("--output-dir")]
    assert parents
    assert all("arent" in meaning or "free space" in meaning for meaning in parents)
