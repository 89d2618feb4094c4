"""The table of engines: every spec is complete, and its classes exist."""

import subprocess
import sys
from typing import get_args

import pytest

from benchctl.engines.engine import engine_for
from benchctl.errors import EngineUnavailableError
from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_table import ENGINES, dialects, guiding_kinds
from benchctl.profile.model import EngineKind

METHODS = ("argv", "env", "request_call", "effective_config", "check_available", "check_requests", "diagnose")


def test_a_spec_names_classes_and_options_that_exist_and_guides_when_it_has_options_of_a_value_model() -> None:
    assert set(get_args(EngineKind)) == set(ENGINES)
    for kind, spec in ENGINES.items():
        options, engine = spec.options_class, engine_for(kind)
        assert spec.kind == engine.kind == kind
        assert issubclass(options, ServerOptions)
        assert all(callable(getattr(engine, method)) for method in METHODS)
        assert bool(options.VALUE_MODEL_OPTIONS) == spec.guides == (kind in guiding_kinds())
        coded = {option for options in spec.coded_options.values() for option in options}
        assert coded | options.flags().keys() | options.VALUE_MODEL_OPTIONS <= options.model_fields.keys()
    with pytest.raises(EngineUnavailableError, match="unknown engine 'abacus'; choose one of sim"):
        engine_for("abacus")


def test_a_dialect_can_state_the_configuration_of_a_server() -> None:
    assert dialects() == (*(spec.kind for spec in ENGINES.values() if spec.is_dialect), "openai")
    assert all(hasattr(engine_for(kind), "attached_config") for kind in dialects() if kind in ENGINES)


def test_the_table_is_read_without_options_or_code_of_an_engine() -> None:
    show = "print([name for name in sys.modules if name.startswith('benchctl.engines')])"
    code = f"import sys, benchctl.profile.engine_table; {show}"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded == "[]\n"
