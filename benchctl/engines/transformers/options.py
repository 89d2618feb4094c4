"""Options of the engine ``transformers``."""

from typing import Annotated

from benchctl.profile.choices import BlockCount, BlockTokens, ContextLength
from benchctl.profile.engine_options import Flag, PythonOptions


class TransformersOptions(PythonOptions):
    """Options of the engine ``transformers`` (``transformers serve``); null leaves the choice to the server."""

    device: Annotated[str | None, Flag()] = None
    """Device that the model runs on, such as ``cpu`` or ``cuda``."""
    continuous_batching: Annotated[bool, Flag(when=True)] = True
    """Batch requests; if false, they are served one after another and no steps are recorded."""
    num_kv_blocks: Annotated[BlockCount | None, Flag("--cb-num-blocks")] = None
    """Blocks of the KV cache."""
    block_size: Annotated[BlockTokens | None, Flag("--cb-block-size")] = None
    """Tokens in one KV block."""
    max_num_batched_tokens: Annotated[ContextLength | None, Flag("--cb-max-batch-tokens")] = None
    """Tokens in one step at most."""
    enable_prefix_caching: bool = False
    """Share KV blocks between prompts with a common beginning; off, because repeated prompts would be free."""
    attn_implementation: Annotated[str | None, Flag()] = None
    """Kernels of attention."""
    step_log: bool = True
    """Record steps, by a launcher that times them inside the server."""
