#!/usr/bin/env bash
# Collects every wheel that a run needs, for a machine without a network:  scripts/wheels.sh DIR [options]  (see --help)
set -euo pipefail
# shellcheck source=scripts/python.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/python.sh"
base="$(_mimo_find_python)" || {
  _mimo_say "no Python 3.12 or later that can make a virtual environment was found: it runs pip, which collects the wheels."
  exit 1
}
exec "$base" "$(dirname -- "${BASH_SOURCE[0]}")/wheels/collect.py" "$@"
