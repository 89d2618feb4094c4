#!/usr/bin/env bash
# The steps of action.yml; each also runs by hand in a checkout: scripts/action.sh checkout|prepare|measure
#
# checkout  the merge base of HEAD with BASE_REF, and HEAD itself, into two directories, which $GITHUB_ENV gets as
#           BENCHCTL_BASE and BENCHCTL_HEAD
# prepare   run the command in PREPARE in both
# measure   run PROFILE with BLOCKS and SETTINGS, compare at THRESHOLD; the Markdown goes to $GITHUB_STEP_SUMMARY
#
# Exit code: 0 no regression found (3, inconclusive, is 0 unless ON_INCONCLUSIVE is fail), 1 regression, 2 something is
# missing, 4 not comparable or invalid, 5 a run failed.
set -euo pipefail

checkout() {
  local base_ref=${BASE_REF:?this action compares a pull request with its merge base: run it on pull_request}
  local root=${RUNNER_TEMP:-$(mktemp -d)}/benchctl-checkouts base side
  git rev-parse --verify --quiet "origin/$base_ref" >/dev/null || git fetch --quiet origin "$base_ref"
  base=$(git merge-base "origin/$base_ref" HEAD) || {
    echo "no merge base with origin/$base_ref: check out with fetch-depth: 0" >&2
    exit 2
  }
  mkdir -p "$root"
  for side in base head; do
    git worktree remove --force "$root/$side" 2>/dev/null || true
    git worktree add --quiet --force --detach "$root/$side" "$([ $side = base ] && echo "$base" || echo HEAD)"
    echo "BENCHCTL_${side^^}=$root/$side" >>"${GITHUB_ENV:-/dev/stdout}"
  done
}

prepare() {
  if [ -n "${PREPARE:-}" ]; then
    for side in "$BENCHCTL_BASE" "$BENCHCTL_HEAD"; do
      (cd "$side" && bash -euo pipefail -c "$PREPARE")
    done
  fi
}

# benchctl of the PATH, or of an environment of its own, so that no build of the engine changes it.
provide_benchctl() {
  if ! command -v benchctl >/dev/null; then
    local environment=${RUNNER_TEMP:-$(mktemp -d)}/benchctl-environment
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet "$(dirname "${BASH_SOURCE[0]}")/.."
    PATH=$environment/bin:$PATH
  fi
}

measure() {
  provide_benchctl
  local settings=() setting directory code=0
  while IFS= read -r setting; do
    setting=${setting//'$BENCHCTL_BASE'/${BENCHCTL_BASE:-}}
    setting=${setting//'$BENCHCTL_HEAD'/${BENCHCTL_HEAD:-}}
    if [ -n "$setting" ]; then settings+=(--set "$setting"); fi
  done <<<"${SETTINGS:-}"
  directory=$(benchctl run --profile "$PROFILE" --blocks "${BLOCKS:-6}" --quiet "${settings[@]}" |
    tee >(cat >&2) | sed -n 's/^results in //p') || code=$?
  echo "directory=$directory" >>"${GITHUB_OUTPUT:-/dev/stdout}"
  if [ "$code" -ne 0 ]; then
    echo "The run ended with exit code $code; its log says why. Nothing was compared." | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
    exit "$code"
  fi
  benchctl compare "$directory" --threshold "${THRESHOLD:-5%}" --markdown ${GITHUB_STEP_SUMMARY:+--github-summary} || code=$?
  if [ "$code" -eq 3 ] && [ "${ON_INCONCLUSIVE:-pass}" = pass ]; then code=0; fi
  exit "$code"
}

case ${1:-} in
  checkout | prepare | measure) "$1" ;;
  *)
    echo "usage: scripts/action.sh checkout|prepare|measure" >&2
    exit 2
    ;;
esac
