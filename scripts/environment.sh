# Sourced by the scripts beside it: makes a virtual environment once and keeps it current.
# Usage: use_environment NAME REQUIREMENT...   (puts the environment's programs first on PATH)

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "benchctl needs Python 3.11 or newer; install it, or name one: PYTHON=/path/to/python $0" >&2
  return 1
}

use_environment() {
  local directory="$root/$1"
  shift
  local wanted
  wanted=$(cat pyproject.toml - <<<"$*" | cksum)
  if [ "$(cat "$directory/.installed" 2>/dev/null || true)" != "$wanted" ]; then
    local python
    python=$(find_python)
    echo "installing into ${directory#"$root"/} (once; about a minute)" >&2
    "$python" -m venv --clear "$directory"
    "$directory/bin/python" -m pip install -qq --disable-pip-version-check "$@" >&2
    echo "$wanted" >"$directory/.installed"
  fi
  export PATH="$directory/bin:$PATH"
}
