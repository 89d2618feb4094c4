#!/usr/bin/env bash
# What guidance of a value model costs on this GPU, by one call: steps by themselves, then servers, in blocks, compared.
# No checkpoint is needed: without MODEL both models are drawn at random on the device. Takes more than an hour.
#
#   scripts/gpu/measure_guided.sh [DIRECTORY]
#
# Leaves guided.md and raw results in DIRECTORY (guided-measurements). From the environment:
#   MODEL, VALUE_MODEL   directories of a base model and of its value model
#   BASE, VALUE          sizes to draw where none are named (qwen2.5-7b, qwen2.5-1.5b)
#   ENGINE               preset (vllm-lenvm-gpu); with vllm-lenvm and the names of a tiny pair it is tried on a CPU
#   PROFILES             experiments (topk-sweep controls guided-idle fused-vs-two-phase noop-skip guided-switches)
#   BLOCKS               of each (6)
#   STEPS                arguments of guided_overhead.py, which times the steps
started_in=$PWD
source "$(dirname "$0")/../environment.sh"
source "$root/scripts/section.sh"
command -v benchctl >/dev/null || use_environment .venv-smoke --editable .
cd "$started_in"

engine=${ENGINE:-vllm-lenvm-gpu}
directory=${1:-guided-measurements}
case $engine in
  *-gpu)
    benchctl doctor --gpu --output-dir "$directory" >&2 # ends here, saying why, where there is no GPU
    BENCHCTL_ENGINES_DEVICE=cuda "$root/scripts/engines/install_vllm.sh" >&2
    ;;
esac
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
settings=()
if [ -z "${MODEL:-}" ]; then
  pair=$directory/pair
  [ -e "$pair/value/config.json" ] || benchctl models make-tiny --value-model --no-weights \
    --like "${BASE:-qwen2.5-7b}" --value-shape "${VALUE:-qwen2.5-1.5b}" "$pair" >&2
  MODEL=$pair/base VALUE_MODEL=$pair/value
  settings=(--set engine.options.load_format=dummy --set engine.options.value_load_format=dummy)
fi

# Each variant that names a value model gets this one; steps of a ladder of controls follow the variant that they divide.
value_settings() {
  benchctl profiles show "$1" --engine "$engine" | python -c '
import sys, yaml
for name, variant in yaml.safe_load(sys.stdin)["variants"].items():
    if (variant.get("server") or {}).get("value_model") and not variant.get("control"):
        print(f"variants.{name}.server.value_model={sys.argv[1]}")' "$VALUE_MODEL"
}

python=${BENCHCTL_ENGINES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/benchctl/engines}/vllm/bin/python
{
  echo "# What guidance costs on $engine"
  echo
  echo "Base model \`$MODEL\`, value model \`$VALUE_MODEL\`${settings[0]:+, random weights}."
} >"$directory/guided.md"
section guided.md benchctl doctor --output-dir "$directory"
read -ra steps <<<"${STEPS:-}"
PYTHONPATH=$root section guided.md "$python" "$root/scripts/gpu/guided_overhead.py" --json "$directory/steps.json" "${steps[@]}"
for profile in ${PROFILES:-topk-sweep controls guided-idle fused-vs-two-phase noop-skip guided-switches}; do
  given=(--set "model=$MODEL" "${settings[@]}")
  while read -r setting; do given+=(--set "$setting"); done < <(value_settings "$profile")
  section guided.md benchctl run --profile "$profile" --engine "$engine" --blocks "${BLOCKS:-6}" --quiet \
    --output-dir "$directory/results" "${given[@]}"
  results=$directory/results/$profile/latest
  [ -e "$results/manifest.json" ] || continue # the section above says why
  section guided.md benchctl show "$results"
  baseline=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["baseline"])' "$results/manifest.json")
  for variant in $(python -c '
import json, sys
print(*sorted({run["variant"] for run in json.load(open(sys.argv[1]))["runs"]} - {sys.argv[2]}))' \
    "$results/plan.json" "$baseline"); do
    section guided.md benchctl compare "$results:$baseline" "$results:$variant"
  done
done
echo "in $directory: guided.md steps.json results/"
