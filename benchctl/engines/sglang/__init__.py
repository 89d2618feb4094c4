"""SGLang: options, start, requests and step log; ``inside`` runs in the server's own environment."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec, RequestFields, ServerCounters

SPEC: Final = EngineSpec(
    kind="sglang",
    options=f"{__name__}.options:SglangOptions",
    implementation=f"{__name__}.engine:SglangEngine",
    is_dialect=True,
    adds_repetition_penalty=True,
    counters=ServerCounters(
        generated_tokens=("sglang:generation_tokens_total",),
        prefix_hits=("sglang:cached_tokens_total",),
        drafts=("sglang:spec_verify_calls_total",),  # its lengths and rates are gauges over a few last steps
        open_requests=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ),
    request_fields=RequestFields(constraints=frozenset({"json", "regex", "choice", "grammar"})),
    coded_options={"BENCHCTL_STEP_LOG": ("step_log",)},
    installed_by="benchctl engines install sglang",
    needs_gpu=True,
)
