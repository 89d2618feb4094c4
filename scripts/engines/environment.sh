# Sourced by the installers beside it. Each engine gets a Python environment of its own, where benchctl looks for it
# (benchctl/engines/environment.py): $BENCHCTL_ENGINES_DIR/<kind>, by default in the user's cache directory.
#
# An installer sets
#   kind      name of the engine
#   pins      packages with their versions
#   unwanted  packages that come along and must not stay
#   cost      what an installation takes, in words
# and may define finish (after pip) and must define verify (does what was installed work?). It then calls
# install_engine, which leaves a stamp with what it installed: as long as the stamp says what is wanted, nothing is done.

source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

engines=${BENCHCTL_ENGINES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/benchctl/engines}
engines=${engines/#\~/$HOME}

# cpu or cuda: what this machine has, unless BENCHCTL_ENGINES_DEVICE says otherwise.
device=${BENCHCTL_ENGINES_DEVICE:-}
if [ -z "$device" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
fi
case $device in
  cpu | cuda) ;;
  *)
    echo "BENCHCTL_ENGINES_DEVICE is '$device'; write cpu or cuda, or leave it out" >&2
    exit 2
    ;;
esac

finish() { :; }

# Whether the environment has exactly the pinned versions and none of the unwanted packages.
has_what_is_wanted() {
  "$python" - "${pins[@]}" -- "${unwanted[@]}" <<'PYTHON'
import importlib.metadata, re, sys

split = sys.argv.index("--")
have = {re.sub(r"[-_.]+", "-", found.name).lower(): found.version for found in importlib.metadata.distributions()}
for pin in sys.argv[1:split]:
    name, version = re.sub(r"\[.*\]", "", pin).split("==")
    if have.get(name, "").partition("+")[0] != version:
        sys.exit(1)
sys.exit(any(name in have for name in sys.argv[split + 1 :]))
PYTHON
}

install_engine() {
  directory=$engines/$kind
  python=$directory/bin/python
  local stamp=$directory/.installed
  local wanted="$device: ${pins[*]}${unwanted[*]:+, without ${unwanted[*]}}"
  mkdir -p "$engines"
  exec 9>"$engines/.$kind.lock"
  flock 9 # two installers of one engine wait for each other
  if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    echo "$kind: installed in $directory ($wanted)"
    return
  fi
  if [ ! -x "$python" ] || [ -e "$stamp" ]; then # other versions than these: begin anew
    "$(find_python)" -m venv --clear "$directory"
  fi
  if has_what_is_wanted; then
    echo "$kind: found in $directory ($wanted)"
  else
    echo "$kind: installing into $directory ($wanted); $cost"
    "$python" -m pip install -qq --disable-pip-version-check --upgrade pip
    "$python" -m pip install -qq --disable-pip-version-check "${pins[@]}"
    if [ ${#unwanted[@]} -gt 0 ]; then
      "$python" -m pip uninstall -qq -y --disable-pip-version-check "${unwanted[@]}" 2>/dev/null
    fi
  fi
  finish
  echo "$kind: checking"
  if ! verify; then
    echo "$kind: what was installed into $directory does not work; the message above says why" >&2
    return 1
  fi
  echo "$wanted" >"$stamp"
  echo "$kind: ready"
}
