#!/usr/bin/env bash
# Everything that is worth knowing of a GPU machine, by one call: how it is set up, whether the two ways of reading a GPU
# agree under load, and what the engine costs there. Takes about a quarter of an hour.
#
#   scripts/gpu_measurements.sh [DIRECTORY]
#
# Leaves Markdown and raw results in DIRECTORY (gpu-measurements); the Markdown is meant for docs/measurements/. From the
# environment:
#   ENGINE  preset or kind (transformers); installed first if it is not there
#   SHAPE   shape of the model of random weights that is made (qwen2.5-1.5b)
#   MODEL   a model to take instead
started_in=$PWD
source "$(dirname "$0")/environment.sh"
source "$root/scripts/section.sh"
command -v benchctl >/dev/null || use_environment .venv-smoke --editable .
cd "$started_in"

engine=${ENGINE:-transformers}
shape=${SHAPE:-qwen2.5-1.5b}
directory=${1:-gpu-measurements}
benchctl doctor --gpu --output-dir "$directory" >&2 # ends here, saying why, where there is no GPU
mkdir -p "$directory"
benchctl doctor --engine "$engine" >/dev/null 2>&1 || "$root/scripts/engines/install_${engine%%-*}.sh" >&2
model=${MODEL:-$directory/model-$shape}
[ -n "${MODEL:-}" ] || [ -e "$model/config.json" ] || benchctl models make-tiny "$model" --shape "$shape" >&2

measure=(benchctl run --engine "$engine" --set "model=$model" --output-dir "$directory/results" --quiet)
for page in machine agreement engine; do rm -f "$directory/$page.md"; done
echo "# The machine" >"$directory/machine.md"
section machine.md benchctl doctor --gpu --engine "$engine" --output-dir "$directory"
section machine.md nvidia-smi
echo "# NVML and nvidia-smi under load" >"$directory/agreement.md"
section agreement.md python "$root/benchmarks/measure/nvml_agreement.py" -- "${measure[@]}" --profile ci-smoke --blocks 1
echo "# What sampling costs on $engine with the model $(basename "$model")" >"$directory/engine.md"
section engine.md "${measure[@]}" --profile topk-sweep --blocks 2
section engine.md benchctl show "$directory/results/topk-sweep/latest"
section engine.md "${measure[@]}" --profile aa --blocks 4
section engine.md benchctl compare "$directory/results/aa/latest:baseline" "$directory/results/aa/latest:again"
echo "in $directory: machine.md agreement.md engine.md results/"
