#!/usr/bin/env bash
source "$(dirname "$0")/install.sh" llamacpp "$@"
