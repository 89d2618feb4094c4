"""``python -m tests.fuzz``: search for inputs on which benchctl fails; exit code 1 when there are some."""
# ruff: noqa: T201 - a program at a terminal

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

if __package__ != "fuzz":  # started from the root of the repository, whose tests import from one another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.commands import DamagedDirectories, load_modules
from fuzz.isolation import Deadline, in_children
from fuzz.readers import READERS, Reader, damage

_CASES_A_ROUND = 10


def main() -> int:
    options = _options()
    kept = Path(options.keep or tempfile.mkdtemp(prefix="benchctl-fuzz-found-"))
    with tempfile.TemporaryDirectory(prefix="benchctl-fuzz-") as name:
        root = Path(name)
        _leave_the_user_alone(root)
        readers = [reader for reader in READERS if options.only in {None, reader.name}]
        has_directories = options.only in {None, "directories"}
        if not readers and not has_directories:
            known = ", ".join(("directories", *(reader.name for reader in READERS)))
            print(f"--only {options.only}: no such target; there are {known}", file=sys.stderr)
            return 2
        share = 0.0 if not readers else 1.0 if not has_directories else 0.3
        found = (
            fuzz_readers(readers, root, kept, options.seed, Deadline(options.seconds * share)) if readers else []
        )
        if has_directories:
            cases = options.cases or sys.maxsize
            found += fuzz_directories(root, kept, options.seed, Deadline(options.seconds * (1 - share)), cases)
    print(f"{len(found)} failures" + (f"; their inputs are in {kept}" if found else ""))
    return 1 if found else 0


def fuzz_readers(readers: list[Reader], root: Path, kept: Path, seed: int, deadline: Deadline) -> list[str]:
    """Round after round of damaged files for each reader until the deadline; returns the failures."""
    found, seen, round_ = [], Counter[str](), 0
    while round_ == 0 or not deadline.has_passed:
        for reader in readers:
            first = round_ * _CASES_A_ROUND
            problems = in_children(
                _CASES_A_ROUND, lambda i, reader=reader, first=first: _read(reader, root, seed, first + i)
            )
            for i, problem in problems.items():
                if seen[_kind(reader.name, problem)] < 1:
                    path = kept / reader.name / f"{seed}-{first + i}"
                    shutil.rmtree(path, ignore_errors=True)
                    damage(reader.honest_files(root), path, _draw(seed, reader, first + i))
                    found.append(problem)
                    print(
                        f"FAILED {reader.name}, seed {seed}, case {first + i}: {problem}\n  input: {path}",
                        flush=True,
                    )
                seen[_kind(reader.name, problem)] += 1
        round_ += 1
    print(
        f"readers: {round_ * _CASES_A_ROUND} cases of each of {len(readers)}; failures by kind: {dict(seen)}",
        flush=True,
    )
    return found


def _read(reader: Reader, root: Path, seed: int, number: int) -> str | None:
    target = root / "case" / reader.name
    shutil.rmtree(target, ignore_errors=True)
    damage(reader.honest_files(root), target, _draw(seed, reader, number))
    return reader.problem(target)


def _draw(seed: int, reader: Reader, number: int) -> random.Random:
    return random.Random(f"{seed}:{reader.name}:{number}")


def fuzz_directories(root: Path, kept: Path, seed: int, deadline: Deadline, most_cases: int) -> list[str]:
    """Case after case of damaged result directories under all commands until the deadline; returns the failures."""
    load_modules()
    cases, found, seen, number = DamagedDirectories(root, seed), [], Counter[str](), 0
    while number < most_cases and (number == 0 or not deadline.has_passed):
        for problem in cases.problems(number, kept / "directories" / f"{seed}-{number}"):
            kind = _kind("directories", problem)
            if seen[kind] < 1:
                found.append(problem)
                print(f"FAILED directories, seed {seed}, case {number}: {problem}", flush=True)
                print(f"  input: {kept / 'directories' / f'{seed}-{number}'}", flush=True)
            seen[kind] += 1
        number += 1
    print(f"directories: {number} cases; failures by kind: {dict(seen)}", flush=True)
    return found


def _kind(name: str, problem: str) -> str:
    """What failures of one cause have in common: the place of a traceback and its last line without details."""
    lines = [line.strip() for line in problem.strip().splitlines()]
    places = [line for line in lines if line.startswith("File ") and "/benchctl/" in line]
    place = places[-1].rpartition("/")[2].replace('"', "") if places else ""
    last = (
        lines[-1].split(":")[0][:80]
        if places
        else "".join(c for c in lines[0].split("): ")[-1] if not c.isdigit())[:60]
    )
    return f"{name}: {place} {last}"


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
