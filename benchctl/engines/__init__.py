"""What differs between kinds of server software, one file each."""

from collections.abc import Callable
from typing import Final, get_args

from benchctl.engines.attach import AttachEngine
from benchctl.engines.engine import Engine
from benchctl.engines.llamacpp import LlamaCppEngine
from benchctl.engines.sglang import SglangEngine
from benchctl.engines.sglang_lenvm import SglangLenvmEngine
from benchctl.engines.sim import SimEngine
from benchctl.engines.transformers import TransformersEngine
from benchctl.engines.vllm import VllmEngine
from benchctl.engines.vllm_lenvm import VllmLenvmEngine
from benchctl.errors import EngineUnavailableError
from benchctl.profile.model import EngineKind

_ENGINES: Final[dict[str, Callable[[], Engine]]] = {
    "sim": SimEngine,
    "sglang": SglangEngine,
    "sglang-lenvm": SglangLenvmEngine,
    "llamacpp": LlamaCppEngine,
    "transformers": TransformersEngine,
    "vllm": VllmEngine,
    "vllm-lenvm": VllmLenvmEngine,
    "attach": AttachEngine,
}


def engine_for(kind: str) -> Engine:
    """The engine of a kind. Raises EngineUnavailableError for kinds that this version cannot measure."""
    if kind in _ENGINES:
        return _ENGINES[kind]()
    known = ", ".join(_ENGINES)
    if kind in get_args(EngineKind):
        raise EngineUnavailableError(f"engine {kind!r} cannot be measured by this version; choose one of {known}")
    raise EngineUnavailableError(f"unknown engine {kind!r}; choose one of {known}")
