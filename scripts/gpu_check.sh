#!/usr/bin/env bash
# Prints what this machine's GPU does, in one table, in less than 8 minutes:  scripts/gpu_check.sh [TABLE ...]  (see --help)
set -euo pipefail
MIMO_NEEDS="pytest sklearn ${MIMO_NEEDS:-}"
# shellcheck source=scripts/env.sh
if ! . "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"; then
  # Some checks need torch alone: any interpreter that has it will do.
  for MIMO_PYTHON in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3" python3 python; do
    "$MIMO_PYTHON" -P -c 'import sys, torch; assert sys.version_info >= (3, 12)' >/dev/null 2>&1 && break
    MIMO_PYTHON=""
  done
  [[ -n "$MIMO_PYTHON" ]] || { printf 'mimo-train: no Python 3.12 with torch was found either\n' >&2; exit 1; }
  printf 'mimo-train: checking with %s, without the environment: what needs it is skipped\n' "$MIMO_PYTHON" >&2
fi
PYTHONPATH="$MIMO_ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$MIMO_PYTHON" -P -m benchmarks.gpu_check "$@"
