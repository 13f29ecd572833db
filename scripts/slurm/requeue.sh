#!/usr/bin/env bash
# Says whether a SLURM job whose step has ended with CODE starts again:  scripts/slurm/requeue.sh CODE [CONFIG] [key=value ...]
# Exit code 0: the run is finished; 75: start it again; else: the end.
set -euo pipefail
# shellcheck source=scripts/launch.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../launch.sh"
code="$1"
shift
mimo_arguments vlm_digits "$@"
# shellcheck source=scripts/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh"
exec "$MIMO_PYTHON" -P -m mimo_train.cli launch requeue "$code" "${mimo_config_and_overrides[@]}"
