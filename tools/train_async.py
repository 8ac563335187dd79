"""slime's train_async.py: as train.py, with rollouts one step ahead of training (--max-staleness says how far).

python tools/train_async.py ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} --hf-checkpoint Qwen3-4B
"""

from __future__ import annotations

import sys

from launch import main

if __name__ == "__main__":
    sys.exit(main(ahead=1))
