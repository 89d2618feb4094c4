"""``transformers serve``: options, start, requests and step log; ``inside`` runs in the server's environment."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec, RequestFields

SPEC: Final = EngineSpec(
    kind="transformers",
    options=f"{__name__}.options:TransformersOptions",
    implementation=f"{__name__}.engine:TransformersEngine",
    is_dialect=True,
    coded_options={
        "--no-prefix-caching": ("enable_prefix_caching",),
        "--step-log": ("step_log", "continuous_batching"),
    },
    request_fields=RequestFields(
        response_format=False, constraints=frozenset(), penalties=frozenset({"repetition_penalty"})
    ),
    preset_without_gpu="transformers-cpu",
    installed_by="benchctl engines install transformers",
)
