"""Options of the engine ``transformers``."""

from typing import Annotated

from pydantic import Field

from benchctl.profile.engine_options import Flag, PythonOptions


class TransformersOptions(PythonOptions):
    """Options of the engine ``transformers`` (``transformers serve``); what is null is left to it."""

    device: Annotated[str | None, Flag()] = None
    """Where the model runs, such as ``cpu`` or ``cuda``."""
    continuous_batching: Annotated[bool, Flag(when=True)] = True
    """Whether requests are batched; without, they are served one after another and no step is recorded."""
    num_kv_blocks: Annotated[int | None, Flag("--cb-num-blocks")] = Field(default=None, ge=1)
    """Blocks of the KV cache."""
    block_size: Annotated[int | None, Flag("--cb-block-size")] = Field(default=None, ge=1)
    """Tokens in one KV block."""
    max_num_batched_tokens: Annotated[int | None, Flag("--cb-max-batch-tokens")] = Field(default=None, ge=1)
    """Tokens in one step at most."""
    enable_prefix_caching: bool = False
    """Whether prompts that begin alike share their KV blocks; off, because repeated prompts would be free."""
    attn_implementation: Annotated[str | None, Flag()] = None
    """Kernels of attention."""
    step_log: bool = True
    """Whether steps are recorded, by a launcher that times them inside the server."""
