#!/usr/bin/env bash
# Runs the tests:  scripts/test.sh [pytest options]    for example  scripts/test.sh tests/unit -x
#
# Reads MIMO_TEST_WORKERS  files of tests that run side by side, each with up to 8 processes; some wait for long  (default: 3,
#                          for two cores)
set -euo pipefail
MIMO_EXTRAS="${MIMO_EXTRAS:-demo,dev,track,resiliency,remote,video,heic,eval,qlora}"
MIMO_NEEDS="pytest pytest_timeout xdist hypothesis kubeflow_trainer_api peft moto obstore av pillow_heif sklearn webdataset mlflow comet_ml nvidia_resiliency_ext jiwer pycocoevalcap rouge_score bitsandbytes ${MIMO_NEEDS:-}"
# shellcheck source=scripts/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd "$MIMO_ROOT"
unset PYTHONDONTWRITEBYTECODE # which has every process compile each module that it imports
export OMP_NUM_THREADS=1 # several processes share the machine in many tests
exec "$MIMO_PYTHON" -m pytest -n "${MIMO_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder --durations=10 "$@"
