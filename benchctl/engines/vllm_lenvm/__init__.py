"""vLLM guided by a value model: a stock server with our logits processor. Its counters are vLLM's."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec

SPEC: Final = EngineSpec(
    kind="vllm-lenvm",
    options=f"{__name__}.options:VllmLenvmOptions",
    implementation=f"{__name__}.engine:VllmLenvmEngine",
    guides=True,
    coded_options={
        "--logits-processors": ("value_model",),
        "BENCHCTL_LENVM_CLOCK": ("value_model", "guidance_clock"),
        "BENCHCTL_LENVM_DESCRIPTION": ("value_model",),
        "BENCHCTL_LENVM_MODEL": ("value_model",),
        "BENCHCTL_LENVM_SETTINGS": (
            "value_model", "value_dtype", "value_load_format", "value_memory_bytes",
            "value_reuse", "value_graphs", "value_kernels", "value_skips_early", "fused", "lazy",
        ),
        "BENCHCTL_LENVM_STEP_LOG": ("value_model", "step_log"),
    },
    preset_without_gpu="vllm-lenvm",
    installed_by="benchctl engines install vllm",
    is_optional_check=True,
)  # fmt: skip
