#!/usr/bin/env bash
# Installs `transformers serve` for the engine "transformers". Which build of torch comes (CPU or CUDA) is pip's choice:
# point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at CPU builds where the CUDA packages are not wanted.
source "$(dirname "$0")/environment.sh"
kind=transformers
pins=(torch==2.13.0 'transformers[serving]==5.23.0')
unwanted=()
cost="about a minute and 1.2 GB (several GB more with CUDA)"

verify() {
  "$python" -c 'import fastapi, pydantic, torch, transformers, uvicorn' && "$directory/bin/transformers" --help >/dev/null
}

install_engine
