"""Options of the engine ``sglang``."""

from typing import Annotated

from benchctl.profile.choices import Concurrency, ContextLength, DeviceCount, Share
from benchctl.profile.engine_options import Flag, PythonOptions


class SglangOptions(PythonOptions):
    """Options of the engine ``sglang``; null leaves the choice to SGLang."""

    device: Annotated[str | None, Flag()] = None
    """Kind of device to run on."""
    max_model_len: Annotated[ContextLength | None, Flag("--context-length")] = None
    """Longest prompt and output together, in tokens."""
    mem_fraction_static: Annotated[Share | None, Flag()] = None
    """Share of the device's memory for weights and KV cache."""
    tensor_parallel_size: Annotated[DeviceCount, Flag("--tp-size")] = 1
    """Devices that each layer is spread over."""
    data_parallel_size: Annotated[DeviceCount, Flag("--dp-size")] = 1
    """Replicas of the engine."""
    enable_prefix_caching: Annotated[bool, Flag("--disable-radix-cache", when=False)] = False
    """Share the KV cache between prompts with a common beginning."""
    enforce_eager: Annotated[bool, Flag("--disable-cuda-graph", when=True)] = False
    """Run without CUDA graphs."""
    overlap_schedule: Annotated[bool, Flag("--disable-overlap-schedule", when=False)] = True
    """Overlap the scheduler with the device."""
    max_num_seqs: Annotated[Concurrency | None, Flag("--max-running-requests")] = None
    """Sequences in one batch at most."""
    max_num_batched_tokens: Annotated[ContextLength | None, Flag("--chunked-prefill-size")] = None
    """Prompt tokens in one step at most."""
    load_format: Annotated[str | None, Flag()] = None
    """Source of the weights; ``dummy`` draws random ones."""
    attention_backend: Annotated[str | None, Flag()] = None
    """Kernels of attention."""
    sampling_backend: Annotated[str | None, Flag()] = None
    """Kernels of sampling."""
    step_log: bool = True
    """Record steps, by a plugin inside the server's scheduler."""
