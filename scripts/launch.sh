# shellcheck shell=bash
# What train_vlm.sh and train_gpt.sh share: their arguments, and the start of this node's launcher. They call
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
  NNODES              number of nodes (default: what SLURM, mpirun, torchrun's PET_* or SkyPilot say, else 1)
  NODE_RANK           this node, 0 to NNODES - 1
  MASTER_ADDR         name or address of node 0
  MASTER_PORT         a free port on node 0 (default: 29500; from the job number under SLURM; any free one on one node)
  NPROC_PER_NODE      processes on each node (default: what the layout needs, divided by NNODES)
  OMP_NUM_THREADS     threads of one process (default: 1)
  CUDA_DEVICE_MAX_CONNECTIONS, PYTORCH_ALLOC_CONF  on GPUs (default: 1, expandable_segments:True)
  MIMO_GRACE_SECONDS  how long a run may take to save after SIGTERM (default: 120)
  MIMO_ARRAY_FILE     a file with a line of key=value for each task of a SLURM job array
  MIMO_MAX_RESTARTS   how often a failed run starts again, from its newest checkpoint (default: 0)
  MIMO_VENV           folder of the Python environment (default: .venv)
  MIMO_EXTRAS         extras to install in it (default: demo,dev; on GPUs give demo,gpu)
  MIMO_WHEELS         folder that 'pip wheel' has filled, to install from without a network
EOF
}

# Sets mimo_config_and_overrides from the arguments of a script.
mimo_arguments() { # DEFAULT_CONFIG [CONFIG] [key=value ...]
  local default="$1" config="" argument overrides=()
  shift
  for argument in "$@"; do
    case "$argument" in
      -h | --help) mimo_usage "$default"; exit 0 ;;
      --container-* | --no-container-*)
        mimo_fail "$argument is an option of scripts/slurm/train_vlm.sbatch: give it before the config"
        ;;
      -*) mimo_fail "unknown option $argument; see $0 --help" ;;
      *=* | '~'*) overrides+=("$argument") ;;
      *)
        [[ -z "$config" ]] || mimo_fail "two configs, $config and $argument: give one, and changes to it as key=value"
        config="$argument"
        ;;
    esac
  done
  mimo_config_and_overrides=("${config:-$default}" ${overrides[@]+"${overrides[@]}"})
}

mimo_launch() {
  mimo_arguments "$@"
  # shellcheck source=scripts/env.sh
  . "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
  # exec: a signal to this script is a signal to the launcher. -P: a data.py or encoders/ in the working directory must
  # not be found in the place of ours.
  exec "$MIMO_PYTHON" -P -m mimo_train.cli launch here "${mimo_config_and_overrides[@]}"
}
