#!/usr/bin/env bash
# Installs SGLang for the engine "sglang". It has no packages for machines without an NVIDIA GPU.
source "$(dirname "$0")/environment.sh"
kind=sglang
pins=(sglang==0.5.23)
unwanted=()
cost="about five minutes and 10 GB"

if [ "$device" != cuda ]; then
  echo "sglang: needs an NVIDIA GPU, and 'nvidia-smi -L' shows none here; install vllm or transformers instead" >&2
  exit 2
fi

verify() { "$python" -c 'import sglang, sglang.launch_server'; }

install_engine
