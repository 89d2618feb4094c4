"""The table of warning codes is complete: each code that is emitted is in it, and each entry is emitted."""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.results.builders import write_results

import benchctl
from benchctl.analysis.validity.checks import reconcile
from benchctl.profile.load import parse_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.loaded import load_results
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import (
    CHECKS,
    CLIENT_SUSPECT_CODES,
    FINDINGS,
    LIGHTER_LOAD_CODES,
    SUSPECT_CODES,
    WARNING_CODES,
    WARNING_TABLE,
    by_severity,
    severity_of,
)

PACKAGE = Path(benchctl.__file__).parent
EMITTERS = {"ResultWarning", "suspect", "_warn", "Finding"}
"""What is called with codes of warnings; other codes are passed on, or keys of tables."""


@cache
def sources() -> tuple[tuple[Path, str], ...]:
    """Every module but those of the table itself."""
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in {"warnings.py", "warning_codes.py"})
    return tuple((path, path.read_text()) for path in paths)


def codes_of(path: Path, node: ast.expr) -> Iterator[str]:
    """Codes that an expression names; a pattern where a part of it is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.escape(node.value)
    elif isinstance(node, ast.IfExp):
        yield from codes_of(path, node.body)
        yield from codes_of(path, node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(re.escape(v.value) if isinstance(v, ast.Constant) else "[a-z-]+" for v in node.values)
    elif isinstance(node, ast.Name) and node.id.isupper():
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield re.escape(getattr(importlib.import_module(module), node.id))


@cache
def codes_by_emitter() -> dict[str, set[str]]:
    """The codes of all calls by the name of what is called: their first argument or ``code``."""
    codes = defaultdict[str, set[str]](set)
    for path, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                named = [word.value for word in node.keywords if word.arg == "code"]
                for argument in (node.args[:1] or named) if name in EMITTERS else ():
                    codes[name] |= {*codes_of(path, argument)}
    return codes


@pytest.mark.slow
def test_each_emitted_warning_code_is_in_the_table_and_each_entry_is_in_a_source() -> None:
    codes = codes_by_emitter()
    patterns = codes["ResultWarning"] | codes["suspect"] | codes["_warn"]
    assert len(patterns) > 50
    assert [each for each in patterns if not any(re.fullmatch(each, code) for code in WARNING_CODES)] == []
    texts = "".join(text for _, text in sources())
    absent = [code for code in WARNING_CODES if f'"{code}"' not in texts]
    assert [code for code in absent if not any(re.fullmatch(each, code) for each in patterns)] == []


def test_a_code_is_in_one_topic_only_and_what_makes_a_run_suspect_has_that_severity() -> None:
    assert len(WARNING_CODES) == sum(map(len, WARNING_TABLE.values()))
    assert {code.replace("\\", "") for code in codes_by_emitter()["suspect"]} <= SUSPECT_CODES
    assert LIGHTER_LOAD_CODES < CLIENT_SUSPECT_CODES < SUSPECT_CODES


def test_findings_are_those_of_the_code() -> None:
    findings = (PACKAGE / "analysis" / "findings.py").read_text()
    assert {code.replace("\\", "") for code in codes_by_emitter()["Finding"]} <= set(FINDINGS)
    assert all(f'"{code}"' in findings for code in FINDINGS)


def test_checks_are_those_of_a_run(tmp_path: Path) -> None:
    results = load_results(write_results(tmp_path).path)
    profile = parse_profile(results.profile_yaml, "profile.yaml")
    run = results.runs[0]
    settings = variant_settings(profile, run.record.variant, run.record.cell)
    checks = reconcile(run, profile, settings, results.requests, profile.stop)
    of_conversations = {"turns"}  # which this set has none of
    assert {check.name for check in checks} == CHECKS.keys() - of_conversations
    of_comparisons = {code.removeprefix("check-") for code in WARNING_CODES if code.startswith("check-")}
    assert of_comparisons - {"failed"} <= set(CHECKS)


def test_an_entry_has_a_sentence_each_for_meaning_and_remedy() -> None:
    for code, entry in WARNING_CODES.items():
        for sentence in (entry.meaning, entry.remedy):
            assert re.fullmatch(r"[A-Z\w][^|]*\.", sentence), code


def test_an_unknown_code_is_a_warning_between_suspects_and_notes() -> None:
    codes = ["server-coalescing", "of-a-later-benchctl", "check-failed"]
    ordered = by_severity(ResultWarning(code=code, message="m") for code in codes)
    assert [warning.code for warning in ordered] == codes[::-1]
    assert severity_of("of-a-later-benchctl") == "warning"
