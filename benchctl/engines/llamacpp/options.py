"""Options of the engine ``llamacpp``."""

from typing import Annotated

from pydantic import Field

from benchctl.profile.sections.engine_options import Flag, LaunchedOptions


class LlamaCppOptions(LaunchedOptions):
    """Options of the engine ``llamacpp`` (``llama-server``); null leaves the choice to the server."""

    binary: str | None = None
    """Path of ``llama-server``; searched for where it is not given."""
    python: str | None = None
    """Interpreter of an environment that carries ``llama-server`` in a package."""
    max_model_len: int = Field(default=2048, ge=1)
    """Longest prompt and output of one sequence together, in tokens (``--ctx-size`` divided by ``--parallel``)."""
    max_num_seqs: Annotated[int, Flag("--parallel")] = Field(default=32, ge=1)
    """Sequences in one batch at most, each with its own share of the context."""
    threads: Annotated[int, Flag()] = Field(default=1, ge=1)
    """Threads of computation; threads that wait for one another spin and take the client's cores."""
    max_num_batched_tokens: Annotated[int | None, Flag("--batch-size")] = Field(default=None, ge=1)
    """Tokens in one step at most."""
    n_gpu_layers: Annotated[int | None, Flag()] = Field(default=None, ge=0)
    """Layers that are computed on the GPU."""
    enable_prefix_caching: Annotated[bool, Flag("--no-cache-prompt", when=False)] = False
    """Reuse the KV cache that an earlier prompt left in the slot."""
