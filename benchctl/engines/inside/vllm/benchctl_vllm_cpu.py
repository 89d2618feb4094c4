"""Runs inside a vLLM server: puts the verification of drafts on a CPU right.

Without Triton vLLM 0.32 spreads the temperature, top_k and top_p of each request over the rows of its drafts by a
function in C++ that fills a copy, and drops the copy unless the values are 64-bit integers, which none of the three
are. The rows of the model that verifies are then divided by memory that nobody has written: answers at any
temperature but 0 follow no distribution that was asked for, and drafts are rejected that should be accepted.

Set BENCHCTL_CORRECTS_CPU_SAMPLING and the function is replaced by one that does what its callers expect. It is not
called at all by servers that do not speculate, and not used where Triton is.
"""

import importlib
import logging
import os

_log = logging.getLogger("vllm.benchctl_cpu_sampling")
_VARIABLE = "BENCHCTL_CORRECTS_CPU_SAMPLING"
_DEFECTIVE = "_expand_kernel_impl"


def correct() -> None:
    """Replace the function in this process, before vLLM registers it. An error leaves the server as it is."""
    if not is_asked_for():
        return
    try:
        fallbacks = importlib.import_module("vllm.utils.cpu_triton_utils")
    except ImportError as error:
        _log.warning("benchctl cannot correct this version of vLLM: %s", error)
        return
    if hasattr(fallbacks, _DEFECTIVE):
        setattr(fallbacks, _DEFECTIVE, spread)


def is_asked_for() -> bool:
    """True where this server is to be corrected, if it runs on a CPU and has no Triton."""
    return bool(os.environ.get(_VARIABLE))


def is_in_use() -> bool:
    """True in a server that takes such functions at all."""
    platforms = importlib.import_module("vllm.platforms")
    triton = importlib.import_module("vllm.triton_utils")
    return is_asked_for() and platforms.current_platform.is_cpu() and not triton.HAS_TRITON


def spread(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):  # type: ignore[no-untyped-def] # noqa: N803, ARG001
    """Write the value of each request to its rows of ``output``; ``cu_num_tokens`` are the ends of the rows.

    A value of ``replace_from`` is written as ``replace_to``. Names are those of vLLM, which passes them by name.
    """
    torch = importlib.import_module("torch")
    values = torch.where(input_val == replace_from, replace_to, input_val)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.repeat_interleave(values, counts))
