#!/usr/bin/env bash
# Trains a plain GPT, on one node or many:  scripts/train_gpt.sh [CONFIG] [key=value ...]  (see --help)
set -euo pipefail
# shellcheck source=scripts/launch.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"
mimo_launch gpt_tiny "$@"
