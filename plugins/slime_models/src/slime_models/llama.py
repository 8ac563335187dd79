"""Llama 3 and models with its architecture: grouped-query attention without biases, angles scaled from 3.1 on."""

from __future__ import annotations

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
