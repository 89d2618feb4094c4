"""Random damage to everything that benchctl reads ends in a clear message, never in a traceback or a hang.

``BENCHCTL_FUZZ_SECONDS`` is the time for the search (3 by default), ``BENCHCTL_FUZZ_SEED`` decides its cases (0).
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fuzz.isolation import command_codes, in_child
from fuzz.mutations import mutated
from fuzz.readers import CORPUS, READERS

SECONDS = float(os.environ.get("BENCHCTL_FUZZ_SECONDS", "3"))
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


def test_what_a_reader_once_failed_on_is_read_or_refused(tmp_path):
    for reader in READERS:
        for path in sorted(CORPUS.glob(f"found/{reader.name}/*")):
            copy = shutil.copytree(path, tmp_path / path.name / reader.name)
            assert in_child(partial(reader.problem, copy)) is None, path


def test_the_search_tells_crashes_hangs_and_deaths_apart():
    def fail():
        raise ZeroDivisionError

    def hang():
        while True:
            pass

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: None) is None
    for run, problem, limit_s in (
        (fail, "ZeroDivisionError", 60),
        (hang, "took longer", 0.3),
        (die, "ended (-9)", 60),
        (lambda: "long", "long", 60),
    ):
        assert problem in in_child(run, limit_s=limit_s)


def test_a_command_that_hangs_is_killed_and_its_exit_code_is_none(tmp_path, monkeypatch):
    assert command_codes([["--version"], ["steptime", "--help"]], tmp_path) == [0, 0]
    assert (tmp_path / "0.txt").read_text().startswith("benchctl ")
    monkeypatch.setattr("benchctl.cli._run", signal.pause)
    assert command_codes([["--version"]], tmp_path, limit_s=0.2) == [None]


def test_damage_follows_from_the_seed_alone_and_differs_between_seeds():
    for kind in ("json", "yaml", "lines", "bytes"):
        honest = b'{"a": [1, 2.5, "x"], "b": {"c": null}}\n' * (3 if kind == "lines" else 1)
        first, again = ([mutated(honest, kind, random.Random(f"{seed}")) for seed in range(50)] for _ in range(2))
        assert first == again
        assert len(set(first)) > 30, kind
