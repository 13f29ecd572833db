#!/usr/bin/env bash
# Trains a vision-language model, on one node or many:  scripts/train_vlm.sh [CONFIG] [key=value ...]  (see --help)
set -euo pipefail
# shellcheck source=scripts/launch.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
mimo_launch vlm_digits "$@"
