"""Graders by `rm_type`, whose rewards tell wrong, unreadable and unjudged apart.

registry     names -> graders          rules        math, dapo, deepscaler, gpqa, f1
equivalence  same text? plain numbers? hostile? else a worker process (pool, worker) asks math-verify
instructions IFEval and IFBench        remote, judge  models behind HTTP
mixture      weighed terms             groups       rewards that look at a whole group
"""

TYPES = (
    "exact_match", "math", "dapo", "deepscaler", "gpqa", "f1", "ifeval", "ifbench", "format", "remote_rm", "llm_judge",
)  # fmt: skip
"""Reward types; each also with :data:`BOXED` before it."""
BOXED = "boxed_"
