#!/usr/bin/env bash
# Prints what this machine's GPU does, in one table, in less than 15 minutes:  scripts/gpu_check.sh [SECTION ...]  (see --help)
set -euo pipefail
MIMO_NEEDS="pytest sklearn transformers ${MIMO_NEEDS:-}"
# shellcheck source=scripts/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
PYTHONPATH="$MIMO_ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$MIMO_PYTHON" -P -m benchmarks.gpu "$@"
