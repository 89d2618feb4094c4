"""The manual is true: every console block of the documentation is run, in order, and its output compared.

A block holds commands after ``$ ``, continued on lines after ``> ``, and below each what it prints. ``# exit N``
behind a command is its exit code. Numbers, times, hashes and paths differ between machines, so the comparison is of
everything else, wherever lines end; ``…`` on a line of its own stands for any lines.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.cli import WITHOUT_PICTURES, WITHOUT_SERVERS, preloaded_directory

ROOT = Path(__file__).parent.parent.parent
TASKS = sorted(f"docs/tasks/{path.name}" for path in (ROOT / "docs" / "tasks").glob("*.md"))
LONGEST = ("docs/comparing.md", "docs/noise.md", "docs/tasks/capacity.md", "docs/tasks/micro-benchmarks.md")
"""Pages that are tried every night: a quarter of a minute to a minute each."""
DOCUMENTS = ["README.md", "docs/comparing.md", "docs/interop.md", "docs/noise.md", *TASKS]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STANDS_FOR = {"scripts/demo": "benchctl run --profile topk-sweep --set sweep.top_k=[1,2]", "scripts/test": ""}
"""Scripts that make an environment of their own, and what they run in it. The tests do not run themselves."""

WITH_SERVERS = "README.md with servers"
"""A night tries its commands as a reader does; by day they are simulated as those of most other pages."""
MEASURED = {
    WITH_SERVERS: WITHOUT_PICTURES,
    "docs/noise.md": WITHOUT_PICTURES,
    "docs/tasks/running-server.md": WITHOUT_PICTURES,
    "docs/tasks/figures.md": {},
}
"""Pages whose runs have servers, or that show pictures; runs of the others take place in virtual time."""

SMALLER = {
    "README.md": {"run mine": "run mine --set workload.output_len=16"},
    "docs/tasks/conversations.md": {"--profile chat": "--profile chat --set workload.input_len=64"},
    "docs/tasks/divide-a-cost.md": {"--profile controls": "--profile controls --set workload.num_prompts=4"},
    "docs/tasks/first-benchmark.md": {"run first": "run first --set workload.output_len=16"},
    "docs/tasks/running-server.md": {"run served": "run served --set workload.output_len=16"},
    "docs/tasks/shared-prefixes.md": {"num_prompts: 48": "num_prompts: 16", "output_len: 32": "output_len: 8"},
    "docs/tasks/speculation.md": {"--blocks 3": "--blocks 3 --set workload.output_len=256"},
    "docs/tasks/tail-latency.md": {"num_prompts: 400": "num_prompts: 300"},
    "docs/tasks/throughput-latency.md": {
        "output_len: 32, num_prompts: 100": "output_len: 32, num_prompts: 60",
        "input_len: 1024, output_len: 24, num_prompts: 64": "input_len: 512, output_len: 16, num_prompts: 32",
    },
}
"""What is asked for in the place of words of a page: fewer requests and tokens, which changes numbers alone."""

NEEDS_TORCH = {"docs/tasks/micro-benchmarks.md"}


@dataclass(frozen=True)
class Command:
    line: str
    exit_code: int
    output: tuple[str, ...]


def commands_of(document: Path) -> list[Command]:
    commands: list[Command] = []
    for block in BLOCK.findall(document.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, *output = part.rstrip("\n").split("\n")
            line, _, remark = first.partition("  # exit ")
            continued = [more[2:] for more in output if more.startswith("> ")]
            text = "\n".join([line.strip(), *continued])
            commands.append(Command(text, int(remark or 0), tuple(output[len(continued) :])))
    return commands


def skeleton(line: str) -> str:
    """A line without what differs between machines: numbers, signs, shares, rules of tables, white space, warnings.

    A row may have fewer or more numbers: the commands here measure fewer cells.
    """
    line = re.sub(r"\d{8}T\d{6}Z-[0-9a-f]{8}", "STAMP", line)
    line = re.sub(r"\b[0-9a-f]{12,64}\b", "HASH", line)
    line = re.sub(r"[-+−~±<]?\d[\d.,]*(e[-+]?\d+)?", "#", line)  # noqa: RUF001  # the typographic minus is meant
    line = re.sub(r"(: done in # s); .*", r"\1", line)  # a run on a busy machine adds its warnings
    line = re.sub(r"[─━═┄\-]{2,}", "-", line)
    line = re.sub(r"(?<= )(#%|-)(?= |$)", "#", line)  # whether a share can be given at all is a matter of noise
    return re.sub(r"#( #)+", "#", re.sub(r"\s+", " ", line)).strip()


def assert_same_output(command: Command, printed: str) -> None:
    actual = f" {' '.join(map(skeleton, printed.splitlines()))} "
    for expected in map(skeleton, command.output):
        if expected in {"…", ""}:
            continue
        _, line, left = actual.partition(f" {expected.removeprefix('# ')} ")  # a number may end the line before
        assert line, (
            f"$ {command.line}\nthe manual shows:\n  {expected}\nafter what was matched so far, benchctl printed:\n"
            f"{actual}"
        )
        actual = f" {left}"


def skip_without_torch():
    """Engines may be left out (BENCHCTL_SKIP_ENGINES=1), and with them every interpreter that has torch."""
    from benchctl.errors import EngineUnavailableError
    from benchctl.micro.worker import find_torch_python

    try:
        find_torch_python(None)
    except EngineUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def sandbox(tmp_path):
    """A directory with what the commands of the manual read, and their environment.

    Outputs are a quarter as long as those that the manual shows, which changes numbers alone. Ends what was left
    running in it: the command that was to end it may not have had its turn.
    """
    for needed in ("profiles", "scripts/examples", "results/example"):
        shutil.copytree(ROOT / needed, tmp_path / needed)
    sweep = tmp_path / "profiles" / "topk-sweep.yaml"
    sweep.write_text(sweep.read_text().replace("output_len: 96", "output_len: 24"))
    directories = [str(preloaded_directory()), str(Path(sys.executable).parent), os.environ["PATH"]]
    stores = {f"BENCHCTL_{store}_DIR": str(tmp_path / store.lower()) for store in ("DATA", "NOISE", "PEAKS")}
    settings = {"PATH": os.pathsep.join(directories), "COLUMNS": "120", "CI": "true", "PYTHONUNBUFFERED": "1"}
    yield tmp_path, os.environ | stores | settings
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if Path(process.cwd()) == tmp_path.resolve():
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in {*LONGEST, WITH_SERVERS} else ())
        for name in sorted([*DOCUMENTS, WITH_SERVERS])
        if commands_of(ROOT / name.split()[0])
    ],
)
def test_every_console_block_of_the_manual_does_what_it_shows(name, sandbox):
    if name in NEEDS_TORCH:
        skip_without_torch()
    directory, env = sandbox
    env |= MEASURED.get(name, WITHOUT_SERVERS)
    smaller = SMALLER.get(name, {})
    assert all(words in (ROOT / name).read_text(encoding="utf-8") for words in smaller)
    for command in commands_of(ROOT / name.split()[0]):
        line = STANDS_FOR.get(command.line, command.line)
        for words, fewer in smaller.items():
            line = line.replace(words, fewer)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=directory,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == command.exit_code, f"$ {command.line}\n{done.stdout}"
        assert_same_output(command, done.stdout)


def test_the_scripts_that_the_manual_names_exist():
    commands = {command.line for command in commands_of(ROOT / "README.md")}
    for script, line in STANDS_FOR.items():
        assert script in commands
        assert os.access(ROOT / script, os.X_OK)
        assert line.partition(" --set")[0] in (ROOT / script).read_text(encoding="utf-8")


def test_every_command_has_help_and_a_task_that_uses_it():
    from benchctl.cli.app import COMMANDS, load_command

    manual = "".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    for name, entry in COMMANDS.items():
        first_paragraph = load_command(name).help.split("\n\n")[0]
        assert entry.help == " ".join(first_paragraph.split()), f"benchctl.cli.app: benchctl {name}"
        assert f"benchctl {name}" in manual, f"neither README.md nor docs/tasks mentions benchctl {name}"


def test_the_readme_fits_on_two_screens_and_leads_to_an_index_of_all_tasks():
    readme, index = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/tasks/README.md"))
    assert len(readme.splitlines()) <= 130
    assert "docs/tasks/README.md" in readme
    for task in set(TASKS) - {"docs/tasks/README.md"}:
        assert f"]({Path(task).name})" in index, task


def test_every_link_and_path_in_a_document_leads_to_a_file():
    for document in [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = document.read_text(encoding="utf-8")
        paths = re.findall(r"(?<![\w/.])((?:benchmarks|docs|scripts|tests)/[\w./-]*\w)", text)
        targets = [document.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
        for target in [*targets, *(ROOT / path for path in paths)]:
            assert target.exists(), f"{document.relative_to(ROOT)}: {target}"
