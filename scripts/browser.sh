#!/usr/bin/env bash
# Sees to it that there is a Chromium for the tests of the report page (pytest -m browser). Where there is none it is
# installed from Debian's packages, which needs root and apt-get; elsewhere install Chromium by hand, or leave those
# tests out: BENCHCTL_SKIP_BROWSER=1.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    exit 0
  fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "no Chromium found; install one (this script can, as root where there is apt-get), or set" \
    "BENCHCTL_SKIP_BROWSER=1" >&2
  exit 1
fi
echo "installing Chromium (once; about a minute)" >&2
apt-get update -qq >&2
DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium fonts-dejavu-core >&2
