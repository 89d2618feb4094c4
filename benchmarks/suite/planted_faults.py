"""How many small faults in benchctl the tests find: `python -m benchmarks.suite.planted_faults`.

Each fault is one changed operator, number or choice in a copy of the tree (`<` to `<=`, `+` to `-`, `min` to `max`,
`and` to `or`, 1 to 2 …), drawn with a seed from the rooms below; the tests of that room run until one fails. Two
states of the tests are compared with one seed on the same code: `--tests DIRECTORY` takes those of another tree.
Some faults change no behaviour, so that not all of them can be found.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 1200
# Code, the tests that guard it, and how many faults are drawn from it.
ROOMS = (
    ("analysis/statistics", ("analysis/statistics", "analysis"), 4),
    ("analysis/experiment", ("analysis/experiment", "analysis"), 3),
    ("analysis/compare", ("analysis/compare", "analysis"), 3),
    ("analysis/attribution", ("analysis/attribution", "analysis"), 2),
    ("analysis/metrics", ("analysis/metrics", "analysis"), 2),
    ("analysis/validity", ("analysis/validity", "analysis"), 2),
    ("records", ("records",), 2),
    ("untrusted", ("untrusted", "records"), 1),
    ("load", ("load",), 2),
    ("measure", ("measure",), 2),
    ("sim", ("sim",), 2),
    ("steptime", ("steptime",), 2),
    ("costs", ("costs",), 1),
    ("workload", ("workload",), 1),
    ("profile", ("profile",), 1),
)
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}


def changed_node(node: ast.expr) -> ast.expr | None:
    """The node with one fault in it; None where nothing is changed in such a node."""
    fault = copy.deepcopy(node)
    match fault:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            fault.ops = [SWAPPED[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
            fault.op = SWAPPED[type(operator)]()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAME:
            fault.func = ast.Name(OTHER_NAME[name])
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            fault.value = number + 1
        case ast.IfExp(body=body, orelse=orelse):
            fault.body, fault.orelse = orelse, body
        case _:
            return None
    return fault


def code_nodes(tree: ast.AST) -> Iterator[ast.expr]:
    """All expressions but those of text: types, messages and formatted strings."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.JoinedStr | ast.Raise | ast.arg | ast.AnnAssign):
            if isinstance(child, ast.expr):
                yield child
            yield from code_nodes(child)


def faults_of(path: Path) -> Iterator[tuple[Path, int, str, str, bytes]]:
    """Path, line, text before, text after, and the whole changed file, for each fault that the file can have."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in code_nodes(ast.parse(source)):
        fault = changed_node(node)
        if fault is not None and not (
            isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant | ast.JoinedStr)
        ):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before, after = source[start:end].decode(), f"({ast.unparse(fault)})"
            yield path, node.lineno, before, after, source[:start] + after.encode() + source[end:]


def drawn_faults(seed: int) -> Iterator[tuple[tuple[str, ...], tuple[Path, int, str, str, bytes]]]:
    for room, tests, count in ROOMS:
        # By line, so that a long formula is no likelier than a short decision.
        by_line = {}
        for path in sorted((ROOT / "benchctl" / room).rglob("*.py")):
            for fault in faults_of(path):
                by_line.setdefault(fault[:2], []).append(fault)
        draw = random.Random(f"{seed} {room}")
        for line in draw.sample(sorted(by_line), count):
            yield tests, draw.choice(by_line[line])


def first_failure(tree: Path, path: Path, folders: tuple[str, ...], processes: int) -> str | None:
    """The first test that fails in the tree; None where all pass. Tests that import the changed file run first."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    importing = [str(test) for test in sorted((tree / "tests").rglob("test_*.py")) if module in test.read_text()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", str(processes)]
    command += ["--dist", "worksteal", "-m", "not nightly and not real_engine and not browser"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    for tests in filter(None, (importing, *([f"tests/{folder}"] for folder in folders))):
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"the tests do not end within {LIMIT_S} s"
        if done.returncode not in (0, 5):
            failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failures[0].split(" - ")[0] if failures else (done.stdout + done.stderr).strip().splitlines()[-1]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the tests of another checkout")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many faults at the beginning")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    options = parser.parse_args()
    rows = []
    for tests, (path, line, before, after, changed) in islice(drawn_faults(options.seed), options.skip, None):
        name = f"{path.relative_to(ROOT / 'benchctl')}:{line}"
        if options.list:
            print(f"{name}: {before} -> {after}")
            continue
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(directory, "main")
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv*", ".git", "results", "tests"))
            shutil.copytree(options.tests, tree / "tests")
            Path(directory, "shared").symlink_to(ROOT.parent / "shared")
            (tree / path.relative_to(ROOT)).write_bytes(changed)
            failure = first_failure(tree, path, tests, options.processes)
        rows.append([name, f"{before} -> {after}", failure or "nothing"])
        print(" | ".join(rows[-1]), flush=True)
    if rows:
        print(f"{sum(row[2] != 'nothing' for row in rows)} of {len(rows)} faults found")


if __name__ == "__main__":
    main()
