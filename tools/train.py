"""slime's train.py: its flags, MODEL_ARGS among them, as `slime run` with Megatron and SGLang.

    python tools/train.py ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} --hf-checkpoint Qwen3-4B --colocate

--dry-run checks everything, the flags against the folder's config.json too, and starts nothing.
"""

from __future__ import annotations

import sys

from launch import main

if __name__ == "__main__":
    sys.exit(main(ahead=0))
