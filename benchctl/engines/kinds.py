"""The implementation of each kind of engine, loaded when it is needed."""

from benchctl.engines.engine import Engine
from benchctl.errors import EngineUnavailableError
from benchctl.profile.engine_table import ENGINES, engine_spec, load_name


def engine_for(kind: str) -> Engine:
    """The engine of a kind. Raises EngineUnavailableError for a kind that does not exist."""
    if kind not in ENGINES:
        raise EngineUnavailableError(f"unknown engine {kind!r}; choose one of {', '.join(ENGINES)}")
    engine: Engine = load_name(engine_spec(kind).implementation)()
    return engine
