"""What the kernels of guidance take of a GPU: compiled for it, on a machine without one.

Triton's compiler needs no GPU, and its launcher is replaced by one that launches nothing. All kernels are compiled
that the check of a server compiles at its start, for the dimensions of models that are usual as value models. For
each kernel the worst of its variants:

    shared      bytes of shared memory of a block; more than the GPU has, and the kernel is refused at its launch
    registers   of a thread
    stack       bytes of a thread in memory: registers that did not suffice

    python -m benchmarks.guided.kernel_resources [--target 80 89 90] [--model NAME ...] [--dtype NAME ...]

Numbers computed here mean nothing. The exit code is 1 where a kernel does not fit.
"""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from benchctl.guided.kernels.check import largest_differences
from benchctl.guided.operations import kernel_operations
from benchctl.guided.value_model.value_model import ValueModelConfig
from benchmarks.common.harness import options, show, write

SHARED_MEMORY: Final = {80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes that a block may have, by compute capability (CUDA C programming guide, technical specifications)."""
DIMENSIONS: Final = {
    "qwen2.5-0.5b": (896, 14, 2, 64, 4864, 151_936),
    "qwen2.5-1.5b": (1536, 12, 2, 128, 8960, 151_936),
    "qwen2.5-7b": (3584, 28, 4, 128, 18_944, 152_064),
    "llama-3.2-1b": (2048, 32, 8, 64, 8192, 128_256),
    "qwen3-0.6b": (1024, 16, 8, 128, 3072, 151_936),
}
"""Hidden size, heads, key heads, dimensions of a head, size within the MLP, and vocabulary."""
DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Of one variant of a kernel."""

    kernel: str
    shared: int
    registers: int
    stack: int


class _Utilities:
    """What Triton asks of a driver beside launches."""

    def __init__(self, target: int) -> None:
        self._target = target

    def load_binary(self, *_: object) -> tuple[object, object, int, int, int]:
        return object(), object(), 0, 0, 1024

    def unload_module(self, _: object) -> None: ...

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self._target]}


class _AbsentGpu:
    """A driver of a GPU that is not there: programs are compiled for it, and launches do nothing."""

    def __init__(self, target: int) -> None:
        self._target, self.utils = target, _Utilities(target)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._target, 32)

    def launcher_cls(self, *_: object) -> Any:
        return lambda *_: None


@contextmanager
def compiling_for(target: int) -> Iterator[list[Resources]]:
    """Let kernels be compiled for a compute capability instead of run; the list grows by each that is compiled."""
    compiled: list[Resources] = []

    def note(*, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object) -> None:
        cubin = next(path for name, path in metadata_group.items() if name.endswith(".cubin"))
        compiled.append(_resources(metadata["name"], metadata["shared"], cubin))

    driver.set_active(_AbsentGpu(target))
    knobs.compilation.listener = note
    try:
        yield compiled
    finally:
        knobs.compilation.listener = None


def _resources(kernel: str, shared: int, cubin: str) -> Resources:
    argv = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    usage = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    return Resources(kernel=kernel, shared=shared, registers=int(registers), stack=int(stack))


def config_of(model: str) -> ValueModelConfig:
    """A value model of these dimensions with one layer."""
    hidden, heads, kv_heads, head_dim, ffn, vocab = DIMENSIONS[model]
    return ValueModelConfig(
        layers=1, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=vocab, ffn=ffn,
        has_head_norm=model.startswith("qwen3"), norm_epsilon=1e-6,
    )  # fmt: skip


def compile_all(model: str, dtype: str) -> None:
    """Compile what the check of a server does. OutOfResources where a kernel takes more than the GPU has."""
    kernels, kind = kernel_operations(), getattr(torch, dtype)
    largest_differences(kernels, config_of(model), torch.device("cpu"), kind)


def main() -> None:
    asked = options(__doc__, target=list(SHARED_MEMORY), model=list(DIMENSIONS), dtype=list(DTYPES))
    if len(asked.target) > 1:  # Triton keeps what it compiled for one device, whichever that is
        argv = [sys.executable, "-m", "benchmarks.guided.kernel_resources", "--model", *asked.model]
        argv += ["--dtype", *asked.dtype, "--target"]
        sys.exit(max(subprocess.run([*argv, str(target)], check=False).returncode for target in asked.target))
    (target,) = asked.target
    rows = []
    with compiling_for(target) as compiled:
        for dtype, model in itertools.product(asked.dtype, asked.model):
            compiled.clear()
            name = f"{model} in {dtype}"
            try:
                compile_all(model, dtype)
            except OutOfResources as error:
                rows.append({"way": name, "failed": str(error)})
            for kernel in sorted({each.kernel for each in compiled}):
                variants = [each for each in compiled if each.kernel == kernel]
                most = {
                    part: max(getattr(each, part) for each in variants) for part in ("shared", "registers", "stack")
                }
                rows.append({"way": name, "kernel": kernel, "variants": len(variants)} | most)
    show(rows, f"compute capability {target / 10}: {SHARED_MEMORY[target]} bytes of shared memory")
    write(asked.json, rows)
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()
