"""Options of the engine ``llamacpp``."""

from typing import Annotated

from benchctl.profile.choices import Concurrency, ContextLength, LayerCount, ThreadCount
from benchctl.profile.engine_options import Flag, LaunchedOptions


class LlamaCppOptions(LaunchedOptions):
    """Options of the engine ``llamacpp`` (``llama-server``); null leaves the choice to the server."""

    binary: str | None = None
    """Path of ``llama-server``; searched for where it is not given."""
    python: str | None = None
    """Interpreter of an environment that carries ``llama-server`` in a package."""
    max_model_len: ContextLength = 2048
    """Longest prompt and output of one sequence together, in tokens (``--ctx-size`` divided by ``--parallel``)."""
    max_num_seqs: Annotated[Concurrency, Flag("--parallel")] = 32
    """Sequences in one batch at most, each with its own share of the context."""
    threads: Annotated[ThreadCount, Flag()] = 1
    """Threads of computation; threads that wait for one another spin and take the client's cores."""
    max_num_batched_tokens: Annotated[ContextLength | None, Flag("--batch-size")] = None
    """Tokens in one step at most."""
    n_gpu_layers: Annotated[LayerCount | None, Flag()] = None
    """Layers that are computed on the GPU."""
    enable_prefix_caching: Annotated[bool, Flag("--no-cache-prompt", when=False)] = False
    """Reuse the KV cache that an earlier prompt left in the slot."""
