"""Keys of [report]."""

from __future__ import annotations

from slime_core.config.sections import FIGURES, ResumeClass, Section, key

LEDGER = ResumeClass("unsafe", "the ledger lies there: a run without its ledger has lost its samples")


class ReportSection(Section):
    """Where figures go."""

    save_samples: int = key(4, "Best and worst samples kept a step for `slime show`.", FIGURES, ge=0)
    profile: int = key(
        0,
        "Step, from 1, that torch's profiler records: RUN/profile/*.json of ranks and embedded engines.",
        FIGURES,
        ge=0,
    )
    export_final: bool = key(True, "Write final/, a Hugging Face folder.", FIGURES)
    save_interval: int = key(20, "Steps between checkpoints; 0 is only at the end and on signals.", FIGURES, ge=0)
    save_keep: int = key(2, "Checkpoints kept, the newest of them; older ones are removed.", FIGURES, ge=1)
    async_save: bool = key(True, "Write checkpoints during training, which waits only for a copy.", FIGURES)
    ledger_keep_steps: int = key(
        0, "Steps whose token payloads are kept behind the oldest checkpoint; 0 is all.", FIGURES, ge=0
    )
    ledger_dir: str = key("", "Local folder of the ledger, where the run directory is on a network.", LEDGER)
    check_hooks: bool = key(
        False, "Watch what hooks do: hash what they may not change, judge 1 % of groups twice.", FIGURES
    )
    custom_rollout_log_function_path: str = key("", "Function by path.", FIGURES)
    custom_eval_rollout_log_function_path: str = key("", "Function by path.", FIGURES)
