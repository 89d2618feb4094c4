"""vLLM: options, start, requests and step log; ``inside`` runs in the server's own environment."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec, ServerCounters

SPEC: Final = EngineSpec(
    kind="vllm",
    options=f"{__name__}.options:VllmOptions",
    implementation=f"{__name__}.engine:VllmEngine",
    is_dialect=True,
    adds_repetition_penalty=True,
    counters=ServerCounters(
        generated_tokens=("vllm:generation_tokens_total",),
        # Without those of a request that was preempted and resumed; each of ``n`` choices counts.
        prefix_hits=("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"),
        drafts=("vllm:spec_decode_num_drafts_total",),
        draft_tokens=("vllm:spec_decode_num_draft_tokens_total",),
        accepted_tokens=("vllm:spec_decode_num_accepted_tokens_total",),
        accepted_by_position=("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
        open_requests=("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ),
    coded_options={
        "--enable-logging-iteration-details": ("step_log",),
        "--lora-modules": ("lora_modules",),
        "--speculative-config": (
            "num_speculative_tokens",
            "speculative_method",
            "draft_model",
            "draft_sampling",
            "prompt_lookup_max",
        ),
        "BENCHCTL_SERVER_DESCRIPTION": (),
        "BENCHCTL_STEP_LOG": ("step_log",),
        "HF_HUB_OFFLINE": ("draft_model", "lora_modules"),
        "BENCHCTL_CORRECTS_CPU_SAMPLING": ("num_speculative_tokens", "speculative_config", "correct_cpu_sampling"),
    },
    preset_without_gpu="vllm-cpu",
    installed_by="benchctl engines install vllm",
)
