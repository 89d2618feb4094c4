"""What differs between kinds of server software, one file each."""

from typing import get_args

from benchctl.engines.sim import SimEngine
from benchctl.errors import EngineUnavailableError
from benchctl.profile.model import EngineKind


def engine_for(kind: str) -> SimEngine:
    """The engine of a kind. Raises EngineUnavailableError for kinds that this version cannot start."""
    if kind == "sim":
        return SimEngine()
    if kind in get_args(EngineKind):
        raise EngineUnavailableError(
            f"engine {kind!r} cannot be started by this version: it has no launcher and no step-log reader for it; "
            "available is 'sim', the simulator (--engine sim)"
        )
    raise EngineUnavailableError(
        f"unknown engine {kind!r}; known are {', '.join(get_args(EngineKind))}, of which 'sim' is available"
    )
