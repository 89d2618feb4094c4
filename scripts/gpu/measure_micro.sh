#!/usr/bin/env bash
# Forward passes, bonus tokens and speculation on this device, by one call into one page: the machine, its measured peaks,
# passes of three models in every mode and data type, both ways of backfill with their verdict, speculation simulated and, on
# vLLM where that is installed, measured. Takes about half an hour on a GPU.
#
#   scripts/gpu/measure_micro.sh [--cpu] [DIRECTORY]
#
# Leaves micro.md and raw results in DIRECTORY (micro-measurements). --cpu (or DEVICE=cpu) measures on the CPU, where graphs
# do not exist, with fewer passes. From the environment:
#   DEVICE         cpu or cuda:N (cuda:0)
#   MODELS         of the forward passes (llama-68m llama-160m qwen2.5-1.5b; on a CPU qwen2.5-0.5b)
#   DTYPES         data types of the forward passes (bfloat16 float16 float32; on a CPU float32 bfloat16)
#   DRAFT          model of the bonus tokens (llama-68m)
#   BATCHES        batch sizes of the forward passes (1,5,10,32,128; on a CPU 5,10)
#   BONUS_BATCHES  batch sizes of the bonus tokens (1,5,10,32,64,128; on a CPU 5,10)
#   CONTEXT        tokens of each sequence in the cache (256)
#   REPLAYS        passes of each point and mode over all blocks (400; on a CPU 200)
#   BLOCKS         of each experiment (8)
#   ROOFLINE       options of benchctl micro roofline
#   TORCH_PYTHON   interpreter that has torch; searched for by default
#   SIMULATED      options of benchctl simulate --profile bonus-tokens
#   MODEL, DRAFT_MODEL  served model and its draft in vLLM; without them a pair of random weights and known acceptance
#   SPECULATION    options of benchctl run --profile speculation on vLLM (--blocks 10; on a CPU as short as can be)
started_in=$PWD
source "$(dirname "$0")/../environment.sh"
source "$root/scripts/section.sh"
command -v benchctl >/dev/null || use_environment .venv-smoke --editable '.[micro,models]'
cd "$started_in"

device=${DEVICE:-cuda:0}
if [ "${1:-}" = --cpu ]; then
  shift
  device=cpu
fi
directory=${1:-micro-measurements}
if [ "$device" = cpu ]; then
  models=${MODELS:-llama-68m llama-160m qwen2.5-0.5b} dtypes=${DTYPES:-float32 bfloat16}
  batches=${BATCHES:-5,10} bonus_batches=${BONUS_BATCHES:-5,10} replays=${REPLAYS:-200}
  served=(--engine vllm-cpu) speculation=${SPECULATION:---blocks 2 --set workload.num_prompts=8 --set workload.output_len=32}
  needed=()
else
  models=${MODELS:-llama-68m llama-160m qwen2.5-1.5b} dtypes=${DTYPES:-bfloat16 float16 float32}
  batches=${BATCHES:-1,5,10,32,128} bonus_batches=${BONUS_BATCHES:-1,5,10,32,64,128} replays=${REPLAYS:-400}
  served=(--engine vllm) speculation=${SPECULATION:---blocks 10}
  needed=(--gpu)
  benchctl doctor --gpu --output-dir "$directory" >&2 # ends here, saying why, where there is no GPU
fi
draft=${DRAFT:-llama-68m} context=${CONTEXT:-256}
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
where=(--device "$device" ${TORCH_PYTHON:+--python "$TORCH_PYTHON"})
how=("${where[@]}" --context "$context" --replays "$replays" --blocks "${BLOCKS:-8}" --quiet)

# Measures into a folder of its own, says what it came to, and leaves the path of the new results in $results.
measure() { # FOLDER COMMAND...
  local folder=$1
  shift
  rm -f "$directory/results/$folder"/*/latest
  section micro.md "$@" --output-dir "$directory/results/$folder"
  results=$(find "$directory/results/$folder" -mindepth 2 -maxdepth 2 -name latest 2>/dev/null | head -n 1)
}

echo "# Forward passes, bonus tokens and speculation on $device" >"$directory/micro.md"
section micro.md benchctl doctor "${needed[@]}" --output-dir "$directory"
read -ra roofline <<<"${ROOFLINE:-}"
read -ra speculation <<<"$speculation"
section micro.md benchctl micro roofline "${where[@]}" "${roofline[@]}"
for model in $models; do
  for dtype in $dtypes; do
    measure "forward-$model-$dtype" benchctl micro forward --model "$model" --dtype "$dtype" --batch-size "$batches" "${how[@]}"
    [ -z "$results" ] || section micro.md benchctl show "$results" # where it is empty, the section above says why
  done
done
measure bonus benchctl micro bonus --model "$draft" --batch-size "$bonus_batches" "${how[@]}"
[ -z "$results" ] || section micro.md benchctl show "$results"
section micro.md benchctl speculation --acceptance 0.8 --draft-tokens 1..8 --draft-cost 0.05
read -ra simulated <<<"${SIMULATED:-}"
measure simulated benchctl simulate --profile bonus-tokens --quiet "${simulated[@]}"
python=${BENCHCTL_ENGINES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/benchctl/engines}/vllm/bin/python
if [ -x "$python" ]; then
  if [ -z "${MODEL:-}" ]; then
    pair=$directory/pair
    [ -e "$pair/draft/config.json" ] || benchctl models make-tiny --draft "$pair" --draft-layers 1 --dtype float32 >&2
    MODEL=$pair/base DRAFT_MODEL=$pair/draft
    served+=(--set engine.options.dtype=float32)
  fi
  served+=(--set "model=$MODEL" --set "variants.speculative.server.draft_model=${DRAFT_MODEL:-null}")
  measure speculation benchctl run --profile speculation --quiet "${served[@]}" "${speculation[@]}"
  [ -z "$results" ] || section micro.md benchctl show "$results"
else
  printf '\nvLLM is not installed here; benchctl engines install vllm installs it.\n' >>"$directory/micro.md"
fi
echo "in $directory: micro.md results/"
