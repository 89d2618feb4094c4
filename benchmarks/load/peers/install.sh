#!/usr/bin/env bash
# Installs the load generators of requirements.txt, each into an environment of its own, where
# benchmarks/load/peers/tools.py looks for it: $BENCHCTL_PEERS/<name>, by default in the user's cache directory. About two
# minutes and 1.5 GB; what is there already in that version is left alone.
#
#   benchmarks/load/peers/install.sh [NAME...]     only these
source "$(dirname "$0")/../../../scripts/environment.sh"

peers=${BENCHCTL_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/benchctl/peers}
peers=${peers/#\~/$HOME}
requirements="$root/benchmarks/load/peers/requirements.txt"

install_peer() {
  local pin=$1 name=${1%%==*}
  local directory="$peers/$name"
  if [ "$(cat "$directory/.installed" 2>/dev/null || true)" = "$pin" ]; then
    echo "$name: installed in $directory ($pin)"
    return
  fi
  echo "$name: installing $pin into $directory"
  "$(find_python)" -m venv --clear "$directory"
  "$directory/bin/python" -m pip install -qq --disable-pip-version-check "$pin"
  "$directory/bin/$name" --version >/dev/null
  echo "$pin" >"$directory/.installed" # last: an installation that broke off is begun anew
  echo "$name: ready"
}

mkdir -p "$peers"
pins=$(grep -v '^#' "$requirements")
for name in "$@"; do
  if ! grep -q "^$name==" <<<"$pins"; then
    echo "'$name' is none of the peers in $requirements; write $(cut -d= -f1 <<<"$pins" | paste -sd ' ')" >&2
    exit 2
  fi
done
for pin in $pins; do
  if [ $# -eq 0 ] || [[ " $* " == *" ${pin%%==*} "* ]]; then install_peer "$pin"; fi
done
