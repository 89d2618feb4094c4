"""Signatures of failures in the log of ``transformers serve``, all observed; the general ones come last."""

from functools import partial
from typing import Final

from benchctl.engines.engine import profile_errors, signatures

_final: Final = partial(signatures, is_final=True)
"""A thread of generation that ended: the server lives on, answers 503 and generates no more."""

_LESS_MEMORY: Final = "lower num_kv_blocks or max_num_batched_tokens, or free memory"
SIGNATURES: Final = (
    *signatures(
        "port-taken", "end the process that holds the port, or leave port out of the profile",
        "address already in use",
    ),
    *profile_errors("bad-model", "correct model: no such directory is there", "Repo id must be in the form"),
    *profile_errors(
        "bad-model", "name a local directory as model, or download the model before",
        "outgoing traffic has been disabled", "couldn't connect to",
        "is not a local folder and is not a valid model identifier",
    ),
    *profile_errors("bad-model", "the model's directory has no weights: complete it", "Error no file named"),
    *profile_errors("bad-model", "the model's weights are damaged: copy them again", "SafetensorError"),
    *profile_errors(
        "bad-model",
        "the model's directory is incomplete or of an unknown kind: it needs config.json and a tokenizer",
        "Unrecognized processing class", "Unrecognized model in", "Can't load tokenizer",
    ),
    *profile_errors(
        "bad-flag", "correct the option or the entry of extra_args that the message at the head of the log names",
        "serve --help' for",
    ),
    *profile_errors("bad-flag", "correct dtype", "Unsupported dtype"),
    *profile_errors("bad-flag", "correct attn_implementation", "Unsupported attention implementation"),
    *profile_errors(
        "bad-flag", "choose an attn_implementation that this environment has",
        "has been toggled on, but it cannot be used",
    ),
    *profile_errors(
        "bad-flag", "choose another attn_implementation, or set continuous_batching to false",
        "is not supported for continuous batching",
    ),
    *profile_errors("bad-device", "correct device, or install a torch that has it", "Torch not compiled with CUDA"),
    *profile_errors("bad-device", "set device to cpu, or make a GPU visible", "Found no NVIDIA driver"),
    *profile_errors(
        "missing-package", "complete the engine's environment: pip install 'transformers[serving]' torch requests",
        "ModuleNotFoundError: No module named", "Missing dependencies for serving", "You can install it with",
    ),
    *_final("out-of-memory", _LESS_MEMORY, "CUDA out of memory", "OutOfMemoryError", "can't allocate memory"),
    *_final("out-of-memory", _LESS_MEMORY, "MemoryError: Memory footprint"),
    *_final(
        "kv-cache-full", "the KV cache cannot hold one request: raise num_kv_blocks",
        "No requests can be scheduled and no requests can be offloaded",
    ),
    *_final(
        "generation-died", "the thread that generates has ended; the traceback in the server's log says why",
        "Error in generation loop",
    ),
)  # fmt: skip
