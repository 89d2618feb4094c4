"""The table of engines: every spec is complete, and its classes exist."""

import subprocess
import sys

import pytest

from benchctl.engines.engine import engine_for
from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_table import ENGINES, dialects, guiding_kinds

METHODS = ("argv", "env", "request_call", "effective_config", "check_available", "check_requests", "diagnose")


@pytest.mark.parametrize("kind", ENGINES)
def test_a_spec_names_classes_that_exist_and_agree_on_the_kind(kind: str) -> None:
    spec = ENGINES[kind]
    engine = engine_for(kind)
    assert spec.kind == engine.kind == kind
    assert issubclass(spec.options_class, ServerOptions)
    assert all(callable(getattr(engine, method)) for method in METHODS)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_guides_exactly_when_it_has_options_of_a_value_model(kind: str) -> None:
    options = ENGINES[kind].options_class
    assert bool(options.VALUE_MODEL_OPTIONS) == ENGINES[kind].guides == (kind in guiding_kinds())
    assert options.model_fields.keys() >= options.VALUE_MODEL_OPTIONS


@pytest.mark.parametrize("kind", ENGINES)
def test_options_behind_flags_and_variables_exist(kind: str) -> None:
    spec = ENGINES[kind]
    coded = {option for options in spec.coded_options.values() for option in options}
    assert coded | spec.options_class.flags().keys() <= spec.options_class.model_fields.keys()


def test_a_dialect_can_state_the_configuration_of_a_server() -> None:
    assert dialects() == (*(spec.kind for spec in ENGINES.values() if spec.is_dialect), "openai")
    assert all(hasattr(engine_for(kind), "attached_config") for kind in dialects() if kind in ENGINES)


def test_the_table_is_read_without_options_or_code_of_an_engine() -> None:
    show = "print([name for name in sys.modules if name.startswith('benchctl.engines')])"
    code = f"import sys, benchctl.profile.engine_table; {show}"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded == "[]\n"
