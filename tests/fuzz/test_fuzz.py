"""Random damage to everything that benchctl reads ends in a clear message, never in a traceback or a hang.

``BENCHCTL_FUZZ_SECONDS`` is the time for the search (60 by default), ``BENCHCTL_FUZZ_SEED`` decides its cases (0).
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import benchctl
from support.results import builders

from fuzz.commands import commands_of
from fuzz.directories import Sandbox, damage_directory
from fuzz.isolation import command_codes, in_children
from fuzz.mutations import mutated
from fuzz.readers import CORPUS, READERS

SECONDS = float(os.environ.get("BENCHCTL_FUZZ_SECONDS", "60"))
SEED = os.environ.get("BENCHCTL_FUZZ_SEED", "0")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_search_over_all_readers_and_result_directories_finds_nothing(tmp_path):
    argv = [sys.executable, "-m", "tests.fuzz", "--seconds", str(SECONDS), "--seed", SEED, "--keep", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS * 3 + 300, check=False)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-4_000:]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_each_reader_reads_its_honest_files(reader, tmp_path):
    reader.read(reader.honest_files(tmp_path))


@pytest.mark.parametrize(
    ("reader", "path"),
    [
        pytest.param(reader, path, id=f"{reader.name}-{path.name}")
        for reader in READERS
        for path in sorted((CORPUS / "found" / reader.name).glob("*"))
    ],
)
def test_what_a_reader_once_failed_on_is_read_or_refused(reader, path, tmp_path):
    copy = shutil.copytree(path, tmp_path / "case" / reader.name)

    def run(_: int) -> str | None:
        return reader.problem(copy)

    assert in_children(1, run) == {}


@pytest.mark.slow
def test_damaged_directories_end_in_exit_codes_of_ours_in_processes_of_their_own(tmp_path):
    sandbox = Sandbox.made(tmp_path / "sandbox")
    for number in range(3):
        sandbox.emptied()
        directory = sandbox.case / "damaged"
        builders.write_results(directory, block_factors=[{"baseline": 1.0, "guided": 1.1}] * 2, num_requests=3)
        draw = random.Random(f"{SEED}:process:{number}")
        what = damage_directory(directory, sandbox, draw)
        before = sandbox.surroundings()
        for argv in commands_of(directory, draw):
            done = benchctl(*argv, cwd=sandbox.work, timeout_s=60)
            assert 0 <= done.returncode <= 5, (what, argv, done.stderr)
            assert "Traceback" not in done.stderr, (what, argv, done.stderr)
        assert sandbox.surroundings() == before, what


def test_the_search_tells_crashes_hangs_and_deaths_apart_and_goes_on():
    def run(number: int) -> str | None:
        if number == 1:
            raise ZeroDivisionError
        if number == 2:
            while True:
                pass
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return "long" if number == 4 else None

    found = in_children(6, run, limit_s=1.0)
    assert found.keys() == {1, 2, 3, 4}
    assert "ZeroDivisionError" in found[1]
    assert "took longer" in found[2]
    assert "ended" in found[3]
    assert found[4] == "long"


def test_a_command_that_hangs_is_killed_and_its_exit_code_is_none(tmp_path):
    codes = command_codes([["--version"], ["steptime", "--help"]], tmp_path)
    assert codes == [0, 0]
    assert (tmp_path / "0.txt").read_text().startswith("benchctl ")
    assert command_codes([["--version"]], tmp_path, limit_s=0.0) == [None]


@pytest.mark.parametrize("kind", ["json", "yaml", "lines", "bytes"])
def test_damage_follows_from_the_seed_alone_and_differs_between_seeds(kind):
    honest = b'{"a": [1, 2.5, "x"], "b": {"c": null}}\n' * (3 if kind == "lines" else 1)
    made = [mutated(honest, kind, random.Random(f"{seed}")) for seed in range(50)]
    assert made == [mutated(honest, kind, random.Random(f"{seed}")) for seed in range(50)]
    assert len(set(made)) > 30
