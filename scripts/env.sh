# shellcheck shell=bash
# Finds the Python environment of this checkout, or sets one up. The scripts beside this file read it:  . scripts/env.sh
#
# Sets  MIMO_ROOT    this checkout
#       MIMO_PYTHON  the interpreter to run; its folder comes first on PATH
# Reads MIMO_VENV    folder of the environment, where the checkout must stay untouched  (default: .venv in the checkout)
#       MIMO_EXTRAS  extras of pyproject.toml to install, besides those that are there  (default: demo,dev)
#       MIMO_NEEDS   modules that the caller needs beside those of training, as test.sh needs pytest
#       MIMO_WHEELS  folder that `pip wheel` has filled: everything is installed from it, nothing is downloaded
#
# The first of these is used: without MIMO_VENV, the active interpreter (a container, a cluster module, a virtual
# environment), where mimo_train is installed in it; an environment that an earlier start has set up; a new one. A
# marker, written last, holds a hash of the dependencies and the extras that are installed: an interrupted set-up is
# repaired, and changed dependencies are installed.

[ -n "${BASH_VERSION:-}" ] || {
  echo "mimo-train: env.sh is read by bash alone: start bash, and there  . scripts/env.sh" >&2
  return 1
}
MIMO_ROOT="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
_mimo_venv="${MIMO_VENV:-$MIMO_ROOT/.venv}"
[[ "$_mimo_venv" == /* ]] || _mimo_venv="$PWD/$_mimo_venv"
_mimo_extras="${MIMO_EXTRAS:-demo,dev}"
_mimo_wheels="${MIMO_WHEELS:-}"
[[ -z "$_mimo_wheels" || "$_mimo_wheels" == /* ]] || _mimo_wheels="$PWD/$_mimo_wheels"
_mimo_uv="0.13.8"

# shellcheck source=scripts/python.sh
. "$MIMO_ROOT/scripts/python.sh"

# Prints the path of interpreter $1 if it can train. Imports no torch. An editable install of another checkout does not
# count: the code that runs would not be the code of this one. Nor does our own environment: its marker decides.
_mimo_active() {
  # shellcheck disable=SC2086  # MIMO_NEEDS is a list of words
  "$1" -P -c '
import os, sys
from importlib.util import find_spec
root, venv, *needs = sys.argv[1:]
if sys.version_info < (3, 12) or os.path.realpath(sys.prefix) == os.path.realpath(venv):
    sys.exit(1)
import mimo_train
home = os.path.dirname(os.path.dirname(os.path.realpath(mimo_train.__file__)))
if home != root and os.path.exists(os.path.join(home, "pyproject.toml")):
    sys.exit(1)
if not all(find_spec(name) for name in ("torch", "megatron.core", *needs)):
    sys.exit(1)
print(sys.executable)' "$MIMO_ROOT" "$_mimo_venv" ${MIMO_NEEDS:-} 2>/dev/null
}

# Prints the hash of what the environment should hold, by its own interpreter, which proves that this one runs.
_mimo_wanted() {
  "$_mimo_venv/bin/python" -I -S -c '
import hashlib, os, sys, tomllib
root = sys.argv[1]
with open(os.path.join(root, "pyproject.toml"), "rb") as file:
    text = tomllib.load(file)
project, hatch = text["project"], text.get("tool", {}).get("hatch")
asked = [project.get(key) for key in ("requires-python", "dependencies", "optional-dependencies", "scripts")]
print(hashlib.sha256(repr([*asked, text["build-system"], hatch, root, sys.version]).encode()).hexdigest())
' "$MIMO_ROOT" 2>/dev/null
}

# Adds the extras that are installed to those that are asked for. What one script needs, another leaves in place.
_mimo_ready() {
  local marker="" installed="" wanted extra ready=0
  [[ -r "$_mimo_venv/.mimo-ready" ]] && read -r marker installed <"$_mimo_venv/.mimo-ready" || return 1
  for extra in ${_mimo_extras//,/ }; do
    [[ ",$installed," == *",$extra,"* ]] || { installed+="${installed:+,}$extra" ready=1; }
  done
  _mimo_extras="$installed"
  wanted="$(_mimo_wanted)" && [[ -n "$wanted" && "$wanted" == "$marker" ]] && ((ready == 0))
}

# One set-up at a time, on all machines that share this folder. The lock ends with the process that holds it.
_mimo_lock() {
  local lock="$_mimo_venv.lock" status=66 owner pid
  if type -P flock >/dev/null; then
    exec 9>"$lock" && { flock -n 9 && return 0 || status=$?; }
    if ((status == 1)); then
      _mimo_say "another start is setting up $_mimo_venv: waiting for it"
      flock 9 && return 0
    fi
  fi
  # No flock, or a file system without it: a folder is the lock, and one whose owner has died is moved away.
  until mkdir "$lock.d" 2>/dev/null; do
    if read -r owner pid <"$lock.d/owner" && [[ "$owner" == "${HOSTNAME:-}" ]] && ! kill -0 "$pid"; then
      mv "$lock.d" "$lock.d.$BASHPID" && rm -rf "$lock.d.$BASHPID"
    fi
    sleep 0.5
  done 2>/dev/null
  printf '%s %s\n' "${HOSTNAME:-}" "$BASHPID" >"$lock.d/owner"
  # shellcheck disable=SC2064  # the path of now
  trap "rm -rf '$lock.d'" EXIT
}

# Prints the pin of torch. What is compiled for it, as Transformer Engine's half for torch, asks for any version to build
# with: it would be built for the newest one, and could not be imported beside the one that is installed.
_mimo_built_for() {
  "$_mimo_venv/bin/python" -I -S -c '
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*(line for line in tomllib.load(file)["project"]["dependencies"] if line.startswith("torch==")))
' "$MIMO_ROOT/pyproject.toml"
}

# Prints the files of pip's option $1, `constraint` or `build-constraint`: those of its variable, or without
# one of its configuration, which the variable hides once this script sets it. (`pip config get` reads one file alone.)
_mimo_pip_takes() {
  "$_mimo_venv/bin/python" -P -m pip config list 2>/dev/null | "$_mimo_venv/bin/python" -I -S -c '
import ast, sys
found = dict(line.rstrip("\n").split("=", 1) for line in sys.stdin if "=" in line)
for section in (":env:", "install", "global"):
    if value := found.get(f"{section}.{sys.argv[1]}"):
        print(*ast.literal_eval(value).split())
        break
' "$1"
}

# Installs this checkout, editable, with uv, or with pip where uv cannot be had or cannot reach what pip is set up for.
_mimo_install() {
  local python="$_mimo_venv/bin/python" what="${MIMO_ROOT}[$_mimo_extras]" quiet=() built="$_mimo_venv/.mimo-built-for"
  local own own_to_build constraints=(--build-constraints "$_mimo_venv/.mimo-built-for")
  [[ -t 2 ]] || quiet=(--quiet)
  if [[ -n "$_mimo_wheels" ]]; then
    "$python" -P -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check \
      --no-index --find-links "$_mimo_wheels" -e "$what"
    return
  fi
  _mimo_built_for >"$built" || return 1
  if [[ "$("$python" -P -m uv --version 2>/dev/null)" != "uv $_mimo_uv"* ]]; then
    "$python" -P -m pip --version >/dev/null 2>&1 || "$python" -P -m ensurepip >/dev/null 2>&1
    "$python" -P -m pip install --quiet --disable-pip-version-check "uv==$_mimo_uv" || true
  fi
  if "$python" -P -m uv --version >/dev/null 2>&1; then
    for own in ${UV_BUILD_CONSTRAINT:-}; do # the option would hide the variable
      constraints+=(--build-constraints "$own")
    done
    # The certificates that the system trusts, as pip takes them: a network may have its own.
    UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}" \
      "$python" -P -m uv pip install ${quiet[@]+"${quiet[@]}"} "${constraints[@]}" --python "$python" \
      -e "$what" && return 0
    _mimo_say "uv could not install it; pip, which reads this machine's own pip configuration, tries now"
  fi
  # Older versions of pip take the constraints of all that is installed for build environments too, later ones these.
  # Spaces separate files in both: of a URL they are %20.
  built="$("$python" -I -S -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$built")" || return 1
  own="$(_mimo_pip_takes constraint)" own_to_build="$(_mimo_pip_takes build-constraint)"
  PIP_CONSTRAINT="$built${own:+ $own}" PIP_BUILD_CONSTRAINT="$built${own_to_build:+ $own_to_build}" \
    "$python" -P -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check -e "$what"
}

# Runs in a subshell: what it traps and locks ends with it. Exits 3 where its one sentence says all.
_mimo_set_up() (
  trap 'exit 130' INT
  trap 'exit 143' TERM
  started=$SECONDS python="$_mimo_venv/bin/python" parent="$(dirname -- "$_mimo_venv")" errors=""
  mkdir -p "$parent" 2>/dev/null
  if [[ ! -w "$parent" ]]; then
    _mimo_say "cannot write to $parent: set MIMO_VENV to a folder for the Python environment that can be written."
    exit 3
  fi
  _mimo_lock
  _mimo_ready && exit 0 # set up by another start while this one waited for the lock

  if [[ -e "$_mimo_venv.unfinished" ]] || ! _mimo_makes_venvs "$python" '3\.(1[2-9]|[2-9][0-9])'; then
    base="$(_mimo_find_python)" || {
      _mimo_say "no Python 3.12 or later that can make a virtual environment was found: install one, for example" \
        "with 'apt install python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12', and start again."
      exit 3
    }
    if [[ -n "$_mimo_wheels" ]]; then
      _mimo_say "setting up $_mimo_venv with $base, from the wheels in $_mimo_wheels"
    else
      _mimo_say "setting up $_mimo_venv with $base (the first time, several gigabytes are downloaded)"
    fi
    : >"$_mimo_venv.unfinished"
    "$base" -P -m venv --clear "$_mimo_venv" || exit 1
  else
    # Complete, or made by hand: what is missing is added, nothing is thrown away.
    _mimo_say "updating $_mimo_venv to this checkout's pyproject.toml"
    : >"$_mimo_venv.unfinished"
    rm -f "$_mimo_venv/.mimo-ready"
  fi
  _mimo_install || exit $(($? == 3 ? 3 : 1))
  # Proves that the environment imports, and leaves byte code behind: without it, as under PYTHONDONTWRITEBYTECODE,
  # every rank of every run would spend about three times as long on its imports.
  errors="$(env -u PYTHONDONTWRITEBYTECODE "$python" -P -W ignore -c \
    'import torch.distributed.run, megatron.core.models.mimo' 2>&1)" || { printf '%s\n' "$errors" >&2; exit 1; }
  wanted="$(_mimo_wanted)" && printf '%s %s\n' "$wanted" "$_mimo_extras" >"$_mimo_venv/.mimo-ready" || exit 1
  rm -f "$_mimo_venv.unfinished"
  _mimo_say "environment ready after $((SECONDS - started)) s"
)

_mimo_main() {
  local candidate path tried=" " status=0
  MIMO_PYTHON=""
  for candidate in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python python3; do
    [[ -z "${MIMO_VENV:-}" ]] && path="$(type -P "$candidate")" && [[ "$tried" != *" $path "* ]] || continue
    tried+="$path "
    MIMO_PYTHON="$(_mimo_active "$path")" && [[ -n "$MIMO_PYTHON" ]] && break
    MIMO_PYTHON=""
  done
  if [[ -z "$MIMO_PYTHON" ]]; then
    _mimo_ready || _mimo_set_up || status=$?
    if ((status == 3)); then return 1; fi
    if ((status != 0)); then
      _mimo_say "the Python environment is not ready; the messages above say why, and the next start repairs it."
      return 1
    fi
    MIMO_PYTHON="$_mimo_venv/bin/python"
  fi
  PATH="$(dirname -- "$MIMO_PYTHON"):$PATH"
  export MIMO_PYTHON MIMO_ROOT PATH
}

_mimo_main
