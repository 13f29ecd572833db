# shellcheck shell=bash
# What train_vlm.sh and train_gpt.sh share: how many processes on which nodes, and their start. They call
#   mimo_launch DEFAULT_CONFIG [CONFIG] [key=value ...]

mimo_fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

mimo_usage() { # DEFAULT_CONFIG
  local script
  script="scripts/$(basename -- "$0")"
  cat <<EOF
usage: $script [CONFIG] [key=value ...]

Trains CONFIG, a name from configs/ or the path of a YAML file (default: $1), with as many processes as its
layout needs. Sets up the Python environment on the first start. key=value changes the config. SIGTERM and Ctrl-C
end a run after its step, with a checkpoint; the same command then continues it.

examples:
  $script
  $script $1 run.dir=runs/second train.iters=100
  $script $1 run.device=cpu optim.lr=3e-4
  NNODES=2 NODE_RANK=0 MASTER_ADDR=node1 $script $1      (on node1)
  NNODES=2 NODE_RANK=1 MASTER_ADDR=node1 $script $1      (on node2)
  srun --ntasks-per-node=1 $script $1                    (in a SLURM job; scripts/slurm/ has one)

variables:
  NNODES              number of nodes (default: 1, or what SLURM says)
  NODE_RANK           this node, 0 to NNODES - 1
  MASTER_ADDR         name or address of node 0
  MASTER_PORT         a free port on node 0 (default: 29500; from the job number under SLURM; any free one on one node)
  NPROC_PER_NODE      processes on each node (default: what the layout needs, divided by NNODES)
  OMP_NUM_THREADS     threads of one process (default: 1 on CPU)
  CUDA_DEVICE_MAX_CONNECTIONS, PYTORCH_ALLOC_CONF  on GPUs (default: 1, expandable_segments:True)
  MIMO_GRACE_SECONDS  how long a run may take to save after SIGTERM (default: 120)
  MIMO_MAX_RESTARTS   how often a failed run starts again, from its newest checkpoint (default: 0)
  MIMO_VENV           folder of the Python environment (default: .venv)
  MIMO_EXTRAS         extras to install in it (default: demo,dev; on GPUs give demo,dev,gpu)
  MIMO_WHEELS         folder of scripts/wheels.sh to install it from, where there is no network
EOF
}

# Prints the first host of a SLURM node list, such as gpu[003-005,9],login1.
mimo_first_host() {
  local list="$1" inside hosts first=""
  if type -P scontrol >/dev/null && hosts="$(scontrol show hostnames "$list" 2>/dev/null)" && [[ -n "$hosts" ]]; then
    printf '%s\n' "${hosts%%$'\n'*}"
  else
    while [[ "${list%%,*}" == *'['* ]]; do
      inside="${list#*'['}"
      first+="${list%%'['*}${inside%%[],-]*}" list="${inside#*']'}"
    done
    printf '%s%s\n' "$first" "${list%%,*}"
  fi
}

# Takes the nodes from SLURM's variables, those of the step before those of the job, where NNODES is not given.
mimo_read_slurm() {
  [[ -z "${NNODES:-}" && -n "${SLURM_JOB_ID:-}" && -n "${SLURM_NODEID:-}" ]] || return 0
  NNODES="${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}"
  ((SLURM_NODEID < NNODES)) || mimo_fail "SLURM_NODEID is $SLURM_NODEID in a job step of $NNODES nodes"
  if ((${SLURM_LOCALID:-0} > 0)); then
    mimo_fail "SLURM started several launchers on this node, and each starts the ranks: use srun --ntasks-per-node=1"
  fi
  ((NNODES > 1)) || return 0
  if [[ -z "${SLURM_STEP_ID:-}" ]]; then
    printf '%s\n' "warning: a job of $NNODES nodes, but srun did not start this script: only one of them runs it;" \
      "  use srun --ntasks-per-node=1 $0 ..." >&2
  fi
  NODE_RANK="${NODE_RANK:-$SLURM_NODEID}"
  MASTER_ADDR="${MASTER_ADDR:-$(mimo_first_host "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}")}"
  MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}" # below the ports that systems give out by themselves
}

mimo_whole() { # NAME VALUE LEAST
  if ! [[ "$2" =~ ^[0-9]+$ ]] || ((10#$2 < $3)); then mimo_fail "$1 is '$2': give a whole number, at least $3"; fi
}

# Succeeds where the run will be on CPU, as far as it can be told without reading the config.
mimo_on_cpu() {
  local argument
  for argument in "$@"; do
    case "$argument" in
      run.device=cpu) return 0 ;;
      run.device=cuda) return 1 ;;
    esac
  done
  [[ -z "${CUDA_VISIBLE_DEVICES-all}" ]] || ! nvidia-smi -L >/dev/null 2>&1
}

mimo_launch() {
  local default="$1" config="" argument overrides=() world nodes
  shift
  for argument in "$@"; do
    case "$argument" in
      -h | --help) mimo_usage "$default"; exit 0 ;;
      -*) mimo_fail "unknown option $argument; see $0 --help" ;;
      *=* | '~'*) overrides+=("$argument") ;;
      *)
        [[ -z "$config" ]] || mimo_fail "two configs, $config and $argument: give one, and changes to it as key=value"
        config="$argument"
        ;;
    esac
  done
  set -- "${config:-$default}" ${overrides[@]+"${overrides[@]}"}

  mimo_read_slurm
  NNODES="${NNODES:-1}"
  mimo_whole NNODES "$NNODES" 1
  if ((NNODES > 1)); then
    [[ -n "${MASTER_ADDR:-}" ]] || mimo_fail "NNODES is $NNODES, but MASTER_ADDR, the name of node 0, is not set"
    [[ -n "${NODE_RANK:-}" ]] || mimo_fail "NNODES is $NNODES, but NODE_RANK, 0 to $((NNODES - 1)), is not set"
    MASTER_PORT="${MASTER_PORT:-29500}"
    mimo_whole NODE_RANK "$NODE_RANK" 0
    mimo_whole MASTER_PORT "$MASTER_PORT" 1
    ((NODE_RANK < NNODES)) || mimo_fail "NODE_RANK is $NODE_RANK, but NNODES is $NNODES: give 0 to $((NNODES - 1))"
  fi
  [[ -z "${NPROC_PER_NODE:-}" ]] || mimo_whole NPROC_PER_NODE "$NPROC_PER_NODE" 1

  # shellcheck source=scripts/env.sh
  . "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
  world="$("$MIMO_PYTHON" -P -m mimo_train.cli world "$@")" || exit 1
  mimo_whole "the number of processes" "$world" 1
  if [[ -z "${NPROC_PER_NODE:-}" ]]; then
    ((world % NNODES == 0)) || mimo_fail "the layout needs $world processes, which $NNODES nodes cannot share evenly:" \
      "change modules.*.layout (or layout=...) or NNODES, or let some be idle with placement.allow_idle=true and" \
      "NPROC_PER_NODE=$(((world + NNODES - 1) / NNODES))"
    NPROC_PER_NODE=$((world / NNODES))
  fi
  if ((NNODES * NPROC_PER_NODE < world)); then  # more may be idle: the program knows
    mimo_fail "the layout needs $world processes, but NNODES * NPROC_PER_NODE = $NNODES * $NPROC_PER_NODE =" \
      "$((NNODES * NPROC_PER_NODE)): change modules.*.layout (or layout=...), NNODES or NPROC_PER_NODE"
  fi

  if mimo_on_cpu "$@"; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  else
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    [[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ]] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
  fi
  nodes=(--standalone)
  if ((NNODES > 1)); then
    nodes=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
  fi
  if [[ -n "${MIMO_MAX_RESTARTS:-}" ]]; then
    mimo_whole MIMO_MAX_RESTARTS "$MIMO_MAX_RESTARTS" 0
    nodes+=(--max-restarts="$MIMO_MAX_RESTARTS")
  fi
  # exec: a signal to this script is a signal to the launcher, which hands it to the ranks. -P, for the launcher and for
  # the ranks: a data.py or encoders/ in the working directory must not be found in the place of ours.
  exec "$MIMO_PYTHON" -P -m mimo_train.launch.torchrun "${nodes[@]}" --nproc-per-node="$NPROC_PER_NODE" --no-python \
    "$MIMO_PYTHON" -P -u -m mimo_train.cli train "$@"
}
