"""``python -m tests.fuzz``: search for inputs on which benchctl fails; exit code 1 when there are some."""
# ruff: noqa: T201 - a program at a terminal

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

if __package__ != "fuzz":  # started from the root of the repository, whose tests import from one another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.commands import DamagedDirectories, load_modules
from fuzz.isolation import in_child
from fuzz.readers import READERS, Reader, damage

_CASES_A_ROUND = 5


def main() -> int:
    options = _options()
    kept = Path(options.keep or tempfile.mkdtemp(prefix="benchctl-fuzz-found-"))
    readers = [reader for reader in READERS if options.only in {None, reader.name}]
    has_directories = options.only in {None, "directories"}
    if not readers and not has_directories:
        targets = ", ".join(("directories", *(reader.name for reader in READERS)))
        print(f"--only {options.only}: no such target; there are {targets}", file=sys.stderr)
        return 2
    share = 0.0 if not readers else 1.0 if not has_directories else 0.3
    failures = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="benchctl-fuzz-") as name:
        root = Path(name)
        _leave_the_user_alone(root)
        for number in _numbers_for(options.seconds * share) if readers else ():
            for reader in readers:
                inputs = root / "case" / reader.name
                problem = in_child(partial(_round, reader, root, inputs, f"{options.seed}-{number}"))
                for path in inputs.glob(f"{options.seed}-*") if problem is not None else ():
                    if _is_new(failures, f"{reader.name}/{path.name}", problem):
                        shutil.copytree(path, kept / reader.name / path.name)
                    shutil.rmtree(path)
        if has_directories:
            load_modules()
            cases = DamagedDirectories(root, options.seed)
            for number in _numbers_for(options.seconds * (1 - share), options.cases or sys.maxsize):
                case = f"directories/{options.seed}-{number}"
                for problem in cases.problems(number, kept / case):
                    _is_new(failures, case, problem)
    print(f"{len(failures)} failures" + (f"; their inputs are in {kept}" if failures else ""))
    return 1 if failures else 0


def _numbers_for(seconds: float, most: int = sys.maxsize) -> Iterator[int]:
    """Numbers of rounds, at least one, until the time is up; says then how many there were."""
    end_s, number = time.monotonic() + seconds, 0
    while number < most and (number == 0 or time.monotonic() < end_s):
        yield number
        number += 1
    print(f"{number} rounds", flush=True)


def _round(reader: Reader, root: Path, inputs: Path, number: str) -> str | None:
    """A few cases, to the first that fails, whose input is left in ``inputs``."""
    for case in range(_CASES_A_ROUND):
        path = inputs / f"{number}-{case}"
        damage(reader.honest_files(root), path, random.Random(f"{reader.name}:{path.name}"))
        problem = reader.problem(path)
        if problem is not None:
            return problem
        shutil.rmtree(path)
    return None


def _is_new(failures: Counter[str], case: str, problem: str) -> bool:
    """Count a failure, and say it when it is the first of its kind."""
    kind = f"{case.partition('/')[0]}: {_kind(problem)}"
    failures[kind] += 1
    if failures[kind] == 1:
        print(f"FAILED {case}: {problem}", flush=True)
    return failures[kind] == 1


def _kind(problem: str) -> str:
    """What failures of one cause have in common: the place of a traceback and its last line without details."""
    lines = [line.strip() for line in problem.strip().splitlines()]
    places = [line.rpartition("/")[2] for line in lines if line.startswith("File ") and "/benchctl/" in line]
    if places:
        return f"{places[-1]} {lines[-1].split(':')[0][:80]}"
    return "".join(c for c in lines[0].split("): ")[-1] if not c.isdigit())[:60]


def _leave_the_user_alone(root: Path) -> None:
    """No store, cache or home of the user is read or written."""
    home = root / "sandbox" / "home"
    names = {
        "HOME": home,
        "TMPDIR": root / "tmp",
        "XDG_CACHE_HOME": home,
        "XDG_STATE_HOME": root / "state",
        "MPLCONFIGDIR": root / "mpl",
    }
    names |= {f"BENCHCTL_{name}_DIR": root / name for name in ("NOISE", "DURATIONS", "PEAKS", "DATA", "ARCHIVES")}
    os.environ.update({name: str(path) for name, path in names.items()} | {"COLUMNS": "200", "NO_COLOR": "1"})
    (root / "tmp").mkdir()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time to search (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="decides every case (default 0)")
    parser.add_argument("--only", help="one reader of tests/fuzz/readers.py, or 'directories'")
    parser.add_argument("--cases", type=int, help="at most so many result directories")
    parser.add_argument("--keep", help="directory for the inputs of failures (default: a new one in /tmp)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
