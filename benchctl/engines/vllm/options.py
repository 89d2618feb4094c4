"""Options of the engine ``vllm``."""

from typing import Annotated, Any

from pydantic import Field

from benchctl.profile.engine_options import Flag, PythonOptions


class VllmOptions(PythonOptions):
    """Options of the engine ``vllm``; null leaves the choice to vLLM."""

    max_model_len: Annotated[int | None, Flag()] = Field(default=None, ge=1)
    """Longest prompt and output together, in tokens."""
    gpu_memory_utilization: Annotated[float | None, Flag()] = Field(default=None, gt=0, le=1)
    """Share of the device's memory that the server may take."""
    kv_cache_memory_bytes: Annotated[str | int | None, Flag()] = None
    """Size of the KV cache, such as ``256M``; in place of a share of the memory."""
    tensor_parallel_size: Annotated[int, Flag()] = Field(default=1, ge=1)
    """Devices that each layer is spread over."""
    data_parallel_size: Annotated[int, Flag()] = Field(default=1, ge=1)
    """Replicas of the engine behind one front end."""
    enable_prefix_caching: Annotated[bool, Flag()] = False
    """Share KV blocks between prompts with a common beginning; off, because repeated prompts would be free."""
    enable_chunked_prefill: Annotated[bool | None, Flag()] = None
    """Compute long prompts in parts; on a CPU vLLM crashes if the request has a seed."""
    enforce_eager: Annotated[bool, Flag()] = False
    """Run without compilation and CUDA graphs."""
    max_num_seqs: Annotated[int | None, Flag()] = Field(default=None, ge=1)
    """Sequences in one batch at most."""
    max_num_batched_tokens: Annotated[int | None, Flag()] = Field(default=None, ge=1)
    """Tokens in one step at most."""
    async_scheduling: Annotated[bool | None, Flag()] = None
    """Overlap the scheduler with the device."""
    load_format: Annotated[str | None, Flag()] = None
    """Source of the weights; ``dummy`` draws random ones and needs none on disk."""
    quantization: Annotated[str | None, Flag()] = None
    """Method by which weights are quantised."""
    speculative_config: Annotated[dict[str, Any] | None, Flag()] = None
    """Speculative decoding, as vLLM takes it."""
    step_log: bool = True
    """Record steps, by a statistics plugin inside the server's front end."""
