"""llama.cpp's ``llama-server``: options, start and requests. It records no steps."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec, RequestFields, ServerCounters

SPEC: Final = EngineSpec(
    kind="llamacpp",
    options=f"{__name__}.options:LlamaCppOptions",
    implementation=f"{__name__}.engine:LlamaCppEngine",
    is_dialect=True,
    counters=ServerCounters(
        generated_tokens=("llamacpp:tokens_predicted_total",),
        open_requests=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ),
    coded_options={"--cache-ram": ("enable_prefix_caching",), "--ctx-size": ("max_model_len", "max_num_seqs")},
    request_fields=RequestFields(constraints=frozenset({"json", "choice", "grammar"})),
    preset_without_gpu="llamacpp-cpu",
    installed_by="benchctl engines install llamacpp",
)
