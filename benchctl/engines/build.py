"""The build of an engine: versions in its environment that can change a number."""

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from benchctl.untrusted.reading import DECODING_ERRORS

CUDA: Final = "cuda"
"""Name under which the CUDA version that torch was built for stands among the packages."""
_PACKAGES: Final = (
    "torch", "triton", "pytorch-triton", "flashinfer-python", "flashinfer-jit-cache", "flash-attn", "xformers",
    "sgl-kernel", "sglang-kernel", "transformers", "tokenizers", "xgrammar", "llguidance", "outlines_core",
    "numba", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12",
    "nvidia-cublas",
)  # fmt: skip
"""What computes, schedules or decodes inside servers, whatever their kind."""
_ASK: Final = """
import importlib.metadata as metadata, json, re, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
if "torch" in found:
    try:
        text = metadata.distribution("torch").locate_file("torch/version.py").read_text()
        cuda = re.search(r"^cuda\\b[^=]*= *'([^']*)'", text, re.MULTILINE)
        if cuda:
            found["cuda"] = cuda[1]
    except OSError:
        pass
print(json.dumps(found))
"""
"""Reads what is installed and imports none of it: importing torch takes seconds."""
_ASK_LIMIT_S: Final = 60.0


@cache
def build_versions(python: Path, distributions: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions in the environment of an interpreter: of ``distributions``, of other packages that can change a
    number, and ``cuda`` as torch was built for it. Empty where the interpreter cannot say.
    """
    try:
        answer = subprocess.run(
            (str(python), "-c", _ASK, *distributions, *_PACKAGES),
            capture_output=True,
            check=True,
            timeout=_ASK_LIMIT_S,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        return dict(sorted(msgspec.json.decode(answer.stdout, type=dict[str, str]).items()))
    except (OSError, subprocess.SubprocessError):
        return {}
    except DECODING_ERRORS:
        return {}
