"""Llama 3 and models with its architecture: grouped-query attention without biases, angles scaled from 3.1 on.

Mistral's is the same, but for a window that its first models had.
"""

from __future__ import annotations

from dataclasses import replace

from slime_convert.bridge import Bridge
from slime_models.fields import DECODER, ONLY, llama3_factor, llama3_scaling
from slime_models.rows import ATTENTION, ENDS, MLP, NORMS

LLAMA = Bridge(
    family="llama",
    rows=(*ENDS, *NORMS, *ATTENTION, *MLP),
    fields={
        **DECODER,
        "rope_scaling": llama3_scaling,
        "rope_scaling_factor": llama3_factor,
    },
    only={**ONLY, "attention_bias": (False,), "mlp_bias": (False,)},
)

MISTRAL = replace(LLAMA, family="mistral")
