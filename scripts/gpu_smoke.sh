#!/usr/bin/env bash
# Is a change to an engine or to benchctl felt on real hardware? Looks at the machine, runs the profile ci-smoke (3
# questions, 4 samples of each) on a real engine, compares with a stored result directory, and prints Markdown.
#
#   scripts/gpu_smoke.sh [--cpu] [OPTION OF benchctl run]...
#
# --cpu asks for no GPU. From the environment:
#   ENGINE     engine preset or kind (vllm)
#   MODEL      directory, GGUF file or name on the hub; else a model of random weights is made and kept, of the shape
#              of Qwen2.5-1.5B, or tiny with --cpu. The simulator needs none
#   BLOCKS     complete replicates (6, the least that can give a verdict)
#   THRESHOLD  margin that a change must leave to count (10%)
#   NOISE      result directory of an A/A experiment of this machine; its noise is the margin where it is larger
#   RESULTS    where result directories and comparison.{md,json,csv,png} are made (results)
#   BASELINE   result directory to compare with ($RESULTS/gpu-smoke-baseline/$ENGINE); the first run is stored there
#   REFRESH    1: compare with the stored baseline, and let this run take its place whatever the verdict is
#   ON_INCONCLUSIVE  pass (as it is) or fail: what becomes of a comparison that could decide nothing
#
# Exit code: 0 no regression found (also where nothing could be decided, which the summary says), 1 regression, 2 something
# is missing, 3 nothing could be decided (with ON_INCONCLUSIVE=fail), 4 not comparable or invalid, 5 a run failed. The
# summary also goes to $GITHUB_STEP_SUMMARY. Recipe: docs/tasks/ci-gate.md.
started_in=$PWD
source "$(dirname "$0")/environment.sh"
command -v benchctl >/dev/null || use_environment .venv-smoke --editable .
cd "$started_in"

engine=${ENGINE:-vllm}
results=${RESULTS:-results}
on_inconclusive=${ON_INCONCLUSIVE:-pass}
if [[ ! $on_inconclusive =~ ^(pass|fail)$ ]]; then
  echo "ON_INCONCLUSIVE is '$on_inconclusive'; write pass or fail" >&2
  exit 2
fi
baseline=${BASELINE:-$results/gpu-smoke-baseline/$engine}
needed=(--gpu)
shape=(--shape qwen2.5-1.5b)
model_name=qwen2.5-1.5b-random
if [ "${1:-}" = --cpu ]; then
  shift
  needed=()
  shape=()
  model_name=tiny-random
fi

# Words of this script; what compare says goes there by itself.
summarize() { tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"; }

model_setting() {
  local model=${MODEL:-}
  if [[ $engine == sim* ]]; then return; fi
  if [ -z "$model" ]; then
    local extra=()
    if [[ $engine == llamacpp* ]]; then  # a model of its own: one kept for another engine has no GGUF file
      extra=(--gguf)
      model_name+=-gguf
    fi
    model=${XDG_CACHE_HOME:-$HOME/.cache}/benchctl/models/$model_name
    if [ ! -e "$model/config.json" ]; then
      mkdir -p "$(dirname "$model")"
      benchctl models make-tiny "$model" "${shape[@]}" "${extra[@]}" >&2
    fi
  fi
  echo "--set=model=$model"
}

benchctl doctor --engine "$engine" "${needed[@]}" --output-dir "$results" >&2
model=$(model_setting)
code=0
said=$(benchctl run --profile ci-smoke --engine "$engine" --blocks "${BLOCKS:-6}" --output-dir "$results" --quiet \
  ${model:+"$model"} "$@" | tee >(cat >&2)) || code=$?
new=$(sed -n 's/^results in //p' <<<"$said")

{
  echo "## Smoke of $engine"
  echo
  echo "\`${new:-nothing measured}\` against \`$baseline\`"
  echo
} | summarize
if [ "$code" -ne 0 ]; then
  echo "The run ended with exit code $code; its log says why. Nothing was compared." | summarize
  exit "$code"
fi
forms=()
for form in md json csv png; do
  rm -f "$results/comparison.$form"
  forms+=(--output "$results/comparison.$form")
done
refresh=()
if [ "${REFRESH:-}" = 1 ]; then refresh=(--refresh); fi
mkdir -p "$(dirname "$baseline")"
benchctl compare "$new" --baseline "$baseline" "${refresh[@]}" --threshold "${THRESHOLD:-10%}" \
  ${NOISE:+--noise-floor "$NOISE"} "${forms[@]}" ${GITHUB_STEP_SUMMARY:+--github-summary} >/dev/null || code=$?
if [ -e "$results/comparison.md" ]; then cat "$results/comparison.md"; fi
case $code in
  3)
    if [ "$on_inconclusive" = pass ]; then code=0; fi
    echo $'\nNo regression was found, and none was ruled out: more blocks (BLOCKS) tell more.' | summarize
    ;;
  4) echo $'\nIf the difference is meant, store a new baseline (REFRESH=1, or remove the stored one).' | summarize ;;
esac
if [ "${REFRESH:-}" = 1 ]; then
  echo $'\nThis run is kept as the new baseline, as REFRESH asks.' | summarize
fi
exit "$code"
