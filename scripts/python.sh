# shellcheck shell=bash
# Finds a Python to make an environment with. env.sh reads this file.

_mimo_say() { printf 'mimo-train: %s\n' "$*" >&2; }

# Succeeds if interpreter $1 runs (a pyenv shim may exist and not run), can make environments, and is version $2 (a
# regular expression).
_mimo_makes_venvs() {
  local version
  version="$("$1" -P -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || return 1
  [[ "$version" =~ ^($2)$ ]]
}

# Prints a Python that can make the environment. 3.12 is what the pinned versions are tested with; the later ones are
# tried in order.
_mimo_find_python() {
  local version candidate pyenv="${PYENV_ROOT:-$HOME/.pyenv}"
  for version in '3\.12' '3\.13' '3\.(1[4-9]|[2-9][0-9])'; do
    for candidate in python3.12 python3.13 python3 python "$pyenv"/versions/3.1[2-9]*/bin/python3; do
      candidate="$(type -P "$candidate")" || continue
      if _mimo_makes_venvs "$candidate" "$version"; then printf '%s\n' "$candidate"; return 0; fi
    done
    if type -P uv >/dev/null; then
      candidate="$(UV_PYTHON_DOWNLOADS=never uv python find --no-project --system '>=3.12' 2>/dev/null)" || continue
      if _mimo_makes_venvs "$candidate" "$version"; then printf '%s\n' "$candidate"; return 0; fi
    fi
  done
  return 1
}
