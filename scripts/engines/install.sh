# Sourced by the scripts beside it: `benchctl engines install`, for a checkout without an environment of benchctl.
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
benchctl engines --help >/dev/null 2>&1 || use_environment .venv-demo --editable .
exec benchctl engines install "$@"
