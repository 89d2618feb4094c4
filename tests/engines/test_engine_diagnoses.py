"""What the end of a server's log says of its failure, by engine: the cause, and whether the profile is to blame."""

import pytest

from benchctl.engines.engine import engine_for

LOGS: dict[str, list[tuple[str, str, int | None]]] = {
    "sim": [
        ("ERROR cannot listen on 127.0.0.1 port 1: address already in use", "port-taken", False),
        ("ERROR unknown model 'x': Built-in shapes are", "bad-model", True),
        ("ERROR unknown hardware 'x': name one of", "bad-model", True),
        ("python -m benchctl.sim: error: argument --noise: invalid choice", "bad-flag", True),
        ("MemoryError", "out-of-memory", False),
    ],
    "vllm": [
        ("api_server.py: error: unrecognized arguments: --frobnicate", "bad-flag", True),
        ("OSError: [Errno 98] Address already in use", "port-taken", False),
        ("HFValidationError: Repo id must be in the form 'repo_name'", "bad-model", True),
        ("RuntimeError: Cannot find any model weights with `/x`", "no-weights", True),
        ("SafetensorError: Error while deserializing header", "damaged-weights", True),
        ("but Transformers does not recognize this architecture", "unsupported-model", True),
        ("ValueError: Target and draft model should have the same vocabulary size.", "bad-draft", True),
        ("max_model_len (9) is greater than the derived max_model_len", "context-too-long", True),
        ("Available memory on node 0 is less than desired CPU memory utilization", "out-of-memory", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out-of-memory", False),
        ("ValueError: Free memory on device cuda:0 (1/80 GiB) on startup", "out-of-memory", False),
        ("Failed to load 0th LogitsProcessor plugin nowhere:Nothing", "bad-plugin", True),
        ("RuntimeError: Found no NVIDIA driver on your system", "no-device", False),
    ],
    "sglang": [
        (
            "ERROR:    [Errno 98] error while attempting to bind on address: address already in use",
            "port-taken",
            False,
        ),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "out-of-memory", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB", "out-of-memory", False),
        (
            "Scheduler hit an exception: Traceback\nRuntimeError: Cannot find any model weights",
            "bad-model",
            True,
        ),
        ("sglang serve: error: unrecognized arguments: --no-such-flag", "bad-flag", True),
        (
            "sglang serve: error: argument --dtype: invalid choice: 'nonsense' (choose from 'auto')",
            "bad-flag",
            True,
        ),
        (
            "context_length (9999) is too great; set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
            "bad-flag",
            True,
        ),
        ("launch_server.py: error: argument --dtype: invalid choice: 'x'", "bad-flag", True),
        ("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'", "bad-model", True),
        ("Initialization failed. warmup error: Traceback", "warm-up-failed", False),
        ("Scheduler hit an exception: Traceback\nValueError: odd", "engine-died", False),
    ],
    "sglang-lenvm": [
        ("Exception: Not implemented, cpu should not be used", "unguidable-request", None),
        ("RuntimeError: Missing key(s): v_head.fc.weight", "bad-value-model", None),
        ("ValueError: Failed to load guidance function from file: /x.py", "bad-flag", None),
        ("RuntimeError: LenVM GPU guidance path failed", "guidance-failed", None),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out-of-memory", None),
    ],
    "llamacpp": [
        (
            "E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9",
            "out-of-memory",
            False,
        ),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", "out-of-memory", False),
        ("llama-server: error while loading shared libraries: libggml.so.0: cannot open", "broken-install", False),
        ("ggml.c:123: GGML_ASSERT(a != b) failed", "server-bug", False),
        ("E srv load_model: failed to load model, 'x.gguf'", "bad-model", True),
    ],
    "transformers": [
        (
            "ERROR:    [Errno 98] error while attempting to bind on address: address already in use",
            "port-taken",
            False,
        ),
        ("OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no'", "bad-model", True),
        ("OSError: Error no file named model.safetensors, or pytorch_model.bin, found in", "bad-model", True),
        ("safetensors._safetensors_rust.SafetensorError: Error while deserializing header", "bad-model", True),
        ("Run 'transformers serve --help' for full details.", "bad-flag", True),
        ("Try 'transformers serve --help' for help.\n\nError: Invalid value for '--port': 'abc'", "bad-flag", True),
        ("ModuleNotFoundError: No module named 'requests'", "missing-package", True),
        ("ValueError: this requires `sentencepiece`. You can install it with `pip", "missing-package", True),
        ("AssertionError: Torch not compiled with CUDA enabled", "bad-device", True),
        ("Error in generation loop: x\ntorch.OutOfMemoryError: CUDA out of memory.", "out-of-memory", False),
        ("Error in generation loop: x\nMemoryError: Memory footprint 2 is more than", "out-of-memory", False),
        ("RuntimeError: No requests can be scheduled and no requests can be offloaded.", "kv-cache-full", False),
        ("Error in generation loop: cannot reshape tensor", "generation-died", False),
    ],
}
ORDINARY = {
    "sim": "INFO serving qwen2.5-7b on http://127.0.0.1:1",
    "vllm": "WARNING Found ulimit of 20000: can cause errors like `OSError: [Errno 24] Too many open files`",
    "sglang": "[2026-01-01 00:00:00] Decode batch, #running-req: 4, #token: 900, cuda graph: True",
    "sglang-lenvm": "[2026-01-01 00:00:00] Decode batch, #running-req: 4, #token: 900",
    "llamacpp": "I srv  llama_server: listening on http://127.0.0.1:8431",
    "transformers": "INFO:     Uvicorn running on http://127.0.0.1:8262 (Press CTRL+C to quit)",
}
FRAMES = {
    "vllm": "{}\n...\nRuntimeError: Engine core initialization failed. See root cause above.",
    "sglang-lenvm": "[2026-01-01 00:00:00] Scheduler hit an exception: Traceback\n{}\n",
}
FINAL = {"sglang": {"port-taken"}, "transformers": {"out-of-memory", "kv-cache-full", "generation-died"}}
"""Failures after which a server lives on without ever becoming ready, or answering again."""
REMEDIES = [
    (
        "RuntimeError: CPU Generator does not use offset\nvllm.v1.engine.exceptions.EngineDeadError: an issue.",
        "seeded-parts",
        "engine.options.enable_chunked_prefill to false",
    ),
    (
        "Available memory on node 0 (20/23 GiB) is less than requested memory for kv (400 GiB)",
        "out-of-memory",
        "lower kv_cache_memory_bytes",
    ),
    ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "engine-died", ""),
]


@pytest.mark.parametrize("kind", LOGS)
def test_the_end_of_a_log_tells_the_cause_and_an_ordinary_log_nothing(kind: str) -> None:
    engine = engine_for(kind)
    assert engine.diagnose(ORDINARY[kind]) is None
    for log, cause, blames_profile in LOGS[kind]:
        known = engine.diagnose(FRAMES.get(kind, "INFO something\n{}\nINFO bye").format(log))
        assert known is not None, log
        assert known.cause == cause
        assert known.remedy
        assert blames_profile in {known.is_profile_error, None}, log
        if kind in FINAL:
            assert known.is_final is (cause in FINAL[kind]), log


def test_failures_of_vllm_come_with_their_remedy() -> None:
    for log, cause, remedy in REMEDIES:
        known = engine_for("vllm").diagnose(log)
        assert known.cause == cause
        assert remedy in known.remedy
