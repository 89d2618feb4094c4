"""What a worker of vLLM is told, as far as our logits processor looks at it; needs nothing of vLLM."""

from types import SimpleNamespace

PROCESSORS = ("benchctl_lenvm:LenvmLogitsProcessor",)


def worker_configuration(*, vocabulary, num_tokens, max_num_seqs, eos, scheduler=None, **more):
    """One device, no speculation. ``scheduler`` and ``more`` are settings beyond these."""
    model = SimpleNamespace(
        logits_processors=list(PROCESSORS),
        max_model_len=num_tokens,
        hf_text_config=SimpleNamespace(eos_token_id=eos),
        try_get_generation_config=dict,
        get_vocab_size=lambda: vocabulary,
    )
    return SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(
            **{"max_num_seqs": max_num_seqs, "async_scheduling": False, **(scheduler or {})}
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        **{"speculative_config": None, **more},
    )
