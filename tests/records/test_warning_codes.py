"""The table of warning codes is complete: each code that is emitted is in it, and each entry is emitted."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from support.results.builders import write_results

import benchctl
from benchctl.analysis.validity.checks import reconcile
from benchctl.profile.load import parse_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.integrity import AlterationKind
from benchctl.records.loaded import load_results
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import (
    CHECKS,
    CLIENT_SUSPECT_CODES,
    FINDINGS,
    IMPORT_LIMITS,
    IMPORT_REPAIRS,
    LIGHTER_LOAD_CODES,
    SUSPECT_CODES,
    WARNING_CODES,
    WARNING_TABLE,
    by_severity,
    severity_of,
)

PACKAGE = Path(benchctl.__file__).parent
PASSED_ON = {
    "benchctl/analysis/compare/words.py",
    "benchctl/analysis/validity/usable.py",
    "benchctl/interop/lenvm/summary.py",
    "benchctl/measure/journal.py",
    "benchctl/measure/measured_run.py",
    "benchctl/measure/run.py",
    "benchctl/measure/server/server.py",
    "benchctl/analysis/attribution/flops.py",
    "benchctl/analysis/findings.py",
}
"""Where a code is handed on, or comes from a type: the literals are elsewhere in the scan."""


@cache
def sources() -> tuple[tuple[Path, ast.Module], ...]:
    tables = {PACKAGE / "records" / name for name in ("warnings.py", "warning_codes.py")}
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if path not in tables)
    return tuple((path, ast.parse(path.read_text())) for path in paths)


def code_arguments(tree: ast.Module, emitter: str) -> Iterator[ast.expr]:
    """The code of each call of ``emitter``: its first argument or ``code``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == emitter:
            named = {word.arg: word.value for word in node.keywords}
            yield from node.args[:1] or [named["code"]]


def literals(path: Path, node: ast.expr) -> Iterator[str]:
    """Codes that an expression names; a pattern where a part of it is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.escape(node.value)
    elif isinstance(node, ast.IfExp):
        yield from literals(path, node.body)
        yield from literals(path, node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(re.escape(v.value) if isinstance(v, ast.Constant) else "[a-z-]+" for v in node.values)
    elif isinstance(node, ast.Name) and node.id.isupper():
        module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        yield re.escape(getattr(module, node.id))
    else:
        location = str(path.relative_to(PACKAGE.parent))
        assert location in PASSED_ON, f"{location}: the code is {ast.unparse(node)}, which is not a literal"


def emitted(*emitters: str) -> set[str]:
    return {
        pattern
        for path, tree in sources()
        for emitter in emitters
        for node in code_arguments(tree, emitter)
        for pattern in literals(path, node)
    }


def codes_with_messages() -> Iterator[str]:
    """The keys of the tables of messages that ``warnings_of`` gets."""
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings_of":
                (table,) = node.args
                assert isinstance(table, ast.Dict)
                yield from (ast.literal_eval(key) for key in table.keys if key is not None)


def emitted_warnings() -> set[str]:
    yielded = {
        node.value.elts[0].value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2
        if isinstance(node.value.elts[0], ast.Constant) and isinstance(node.value.elts[0].value, str)
    }
    imports = WARNING_TABLE[IMPORT_REPAIRS] | WARNING_TABLE[IMPORT_LIMITS]
    computed = [
        *get_args(AlterationKind),
        *codes_with_messages(),
        *(code for code in yielded if code in imports),
        *lenvm_codes(),
        "models-assumed",
        *("position-effect", "ratio-drift"),
    ]
    return emitted("ResultWarning", "suspect", "_warn") | flops_codes() | set(map(re.escape, computed))


def lenvm_codes() -> Iterator[str]:
    """The codes of tables about a LenVM directory, whose warnings are those that apply."""
    tree = ast.parse((PACKAGE / "interop/lenvm/summary.py").read_text())
    functions = {"_repairs", "_limits", "_limits_of_steps"}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            tables = (node for node in ast.walk(function) if isinstance(node, ast.Dict))
            yield from (ast.literal_eval(key) for table in tables for key in table.keys if key is not None)


def flops_codes() -> set[str]:
    """The codes of FLOPs, under which messages are filed: ``messages["code"] = ...`` or ``messages.setdefault``."""
    tree = ast.parse((PACKAGE / "analysis/attribution/flops.py").read_text())
    keys = [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    keys += code_arguments(tree, "setdefault")
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def is_in_table(pattern: str) -> bool:
    return any(re.fullmatch(pattern, code) for code in WARNING_CODES)


@pytest.mark.slow
def test_each_emitted_warning_code_is_in_the_table() -> None:
    unknown = [
        pattern for pattern in emitted_warnings() if not any(re.fullmatch(pattern, c) for c in WARNING_CODES)
    ]
    assert unknown == []


def test_each_entry_of_the_table_is_emitted_somewhere() -> None:
    patterns = emitted_warnings()
    never = [code for code in WARNING_CODES if not any(re.fullmatch(pattern, code) for pattern in patterns)]
    assert never == []


def test_a_code_is_in_one_topic_only() -> None:
    assert len(WARNING_CODES) == sum(map(len, WARNING_TABLE.values()))


def test_what_makes_a_run_suspect_has_that_severity() -> None:
    assert {code.replace("\\", "") for code in emitted("suspect")} <= SUSPECT_CODES
    assert LIGHTER_LOAD_CODES < CLIENT_SUSPECT_CODES < SUSPECT_CODES


def test_findings_are_those_of_the_code() -> None:
    findings = (PACKAGE / "analysis" / "findings.py").read_text()
    assert {code.replace("\\", "") for code in emitted("Finding")} <= set(FINDINGS)
    assert all(f'"{code}"' in findings for code in FINDINGS)


def test_checks_are_those_of_a_run(tmp_path: Path) -> None:
    results = load_results(write_results(tmp_path).path)
    profile = parse_profile(results.profile_yaml, "profile.yaml")
    run = results.runs[0]
    settings = variant_settings(profile, run.record.variant, run.record.cell)
    checks = reconcile(run, profile, settings, results.requests, profile.stop)
    assert {check.name for check in checks} == set(CHECKS)
    of_comparisons = {code.removeprefix("check-") for code in WARNING_CODES if code.startswith("check-")}
    assert of_comparisons - {"failed"} <= set(CHECKS)


@pytest.mark.parametrize(("code", "entry"), WARNING_CODES.items())
def test_an_entry_has_a_sentence_each_for_meaning_and_remedy(code: str, entry: object) -> None:
    for sentence in (WARNING_CODES[code].meaning, WARNING_CODES[code].remedy):
        assert re.fullmatch(r"[A-Z\w].*\.", sentence)
        assert "|" not in sentence


def test_an_unknown_code_is_a_warning_between_suspects_and_notes() -> None:
    codes = ["server-coalescing", "of-a-later-benchctl", "check-failed"]
    ordered = by_severity(ResultWarning(code=code, message="m") for code in codes)
    assert [warning.code for warning in ordered] == codes[::-1]
    assert severity_of("of-a-later-benchctl") == "warning"
