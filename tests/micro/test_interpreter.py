"""The search for an interpreter that has torch: the named one, our own, then those of engines."""

import json
import sys
from pathlib import Path

import pytest

from benchctl.errors import EngineUnavailableError
from benchctl.micro import worker
from benchctl.micro.worker import find_torch_python


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Adds the interpreter of an engine whose torch has the given version; our own interpreter has none."""
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path))
    own = sys.executable
    asked = worker.installed_versions
    monkeypatch.setattr(worker, "installed_versions", lambda p, n: {} if str(p) == own else asked(p, n))

    def add(kind, version):
        python = tmp_path / kind / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho '{json.dumps({'versions': {'torch': version} if version else {}})}'\n")
        python.chmod(0o755)
        return python

    return add


def test_without_torch_anywhere_the_error_names_both_remedies(engines, tmp_path):
    engines("sglang", None)
    with pytest.raises(EngineUnavailableError, match=r"benchctl engines install transformers.*--python") as caught:
        find_torch_python(None)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_engine_whose_torch_was_built_for_a_gpu_comes_first(engines):
    of_cpu = engines("a", "2.13.0+cpu")
    assert find_torch_python(None) == of_cpu
    of_gpu = engines("b", "2.13.0+cu130")
    engines("c", "2.13.0")
    assert find_torch_python(None) == of_gpu


def test_our_own_interpreter_comes_before_those_of_engines(engines, monkeypatch):
    engines("a", "2.13.0")
    monkeypatch.setattr(worker, "installed_versions", lambda python, names: {"torch": "2.13.0"})
    assert find_torch_python(None) == Path(sys.executable)


def test_a_named_interpreter_is_the_one_or_an_error(engines, tmp_path):
    named = engines("mine", "2.9.0")
    assert find_torch_python(named) == named
    with pytest.raises(EngineUnavailableError, match=r"has no torch; run .* -m pip install"):
        find_torch_python(engines("bare", None))
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(EngineUnavailableError, match="cannot be executed; name an interpreter"):
            find_torch_python(path)
