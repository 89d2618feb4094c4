"""The engines by the names of their kinds."""

from collections.abc import Callable
from typing import Final

from benchctl.engines.attach import AttachEngine
from benchctl.engines.engine import Engine
from benchctl.engines.llamacpp import LlamaCppEngine
from benchctl.engines.sglang.engine import SglangEngine
from benchctl.engines.sglang_lenvm.engine import SglangLenvmEngine
from benchctl.engines.sim import SimEngine
from benchctl.engines.transformers.engine import TransformersEngine
from benchctl.engines.vllm.engine import VllmEngine
from benchctl.engines.vllm_lenvm.engine import VllmLenvmEngine
from benchctl.errors import EngineUnavailableError

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
    """The engine of a kind. Raises EngineUnavailableError for one that there is not."""
    if kind not in _ENGINES:
        raise EngineUnavailableError(f"unknown engine {kind!r}; choose one of {', '.join(_ENGINES)}")
    return _ENGINES[kind]()
