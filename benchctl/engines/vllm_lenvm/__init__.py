"""vLLM guided by a value model: a stock server with our logits processor. Its counters are vLLM's."""

from typing import Final

from benchctl.profile.engine_table import EngineSpec

SPEC: Final = EngineSpec(
    kind="vllm-lenvm",
    options=f"{__name__}.options:VllmLenvmOptions",
    implementation=f"{__name__}.engine:VllmLenvmEngine",
    guides=True,
    installed_by="scripts/engines/install_vllm.sh",
    is_optional_check=True,
)
