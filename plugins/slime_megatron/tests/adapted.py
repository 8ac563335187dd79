"""A stage with a drawn adapter, over a base that is a folder's model less what it adds: together they are that model."""

import torch


def adapted(model, stored, gradients):
    """Give a model a drawn adapter, and the base to it.

    Args:
        stored: the folder's tensors
        gradients: of the folder's tensors, by the same names

    Returns:
        Gradients of factors by their names. Of W' = W + s B A they are s B^T dW' and s dW' A^T.
    """
    from slime_core.lora.folder import Factors, factors_of
    from slime_megatron.adapter_entries import spots

    adapter, draw, scaling = model.adapter, torch.Generator().manual_seed(9), model.adapter.spec.scaling
    factors, deltas, slopes, base = {}, {}, {}, dict(stored)
    for weight, shapes in factors_of(adapter.targets, adapter.name).items():
        factors[weight] = Factors(*(torch.randn(one.shape, generator=draw) * 0.2 for one in (shapes.a, shapes.b)))
        deltas[weight] = factors[weight].b.double() @ factors[weight].a.double() * scaling
        slopes[weight] = torch.zeros_like(deltas[weight])
    for entry in model.tensors.of_model().entries:
        for name, spot in zip(entry.hf, spots(entry, model.tensors), strict=True):
            if spot.name in deltas:
                part = slice(spot.begin, spot.begin + base[name].numel())
                base[name] = (base[name] - deltas[spot.name].reshape(-1)[part].view(base[name].shape)).float()
                slopes[spot.name].view(-1)[part] = gradients[name].reshape(-1).double()
    adapter.fill(factors.__getitem__)
    model.fill(base)
    of_factors = {
        weight: Factors(one.b.double().mT @ slopes[weight] * scaling, slopes[weight] @ one.a.double().mT * scaling)
        for weight, one in factors.items()
    }
    return adapter.named(of_factors.__getitem__)
