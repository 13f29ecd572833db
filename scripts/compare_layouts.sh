#!/usr/bin/env bash
# Trains a few steps in several layouts and compares losses and gradient norms:  scripts/compare_layouts.sh [options]
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd "$MIMO_ROOT"
exec "$MIMO_PYTHON" -m tests.dist.compare_layouts "$@"
