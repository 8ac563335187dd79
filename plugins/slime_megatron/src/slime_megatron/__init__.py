"""Megatron-core trains: the released package, no patch, nothing of megatron.training."""
