"""The state of sequences that are decoded, [7, S] int64 on the device: read before a pass, moved on after it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slime_core.kernels import by_triton

Tensor = torch.Tensor

TOKEN, POSITION, SEED, TOP_K, TEMPERATURE, TOP_P, ADVANCE = range(7)
"""Rows of the state; the two numbers are the bits of float32, ``ADVANCE`` is 0 for what stands for no sequence."""


class SequenceRows(NamedTuple):
    """The state of R sequences, row by row."""

    tokens: Tensor  # int64, as all that follow but for what is said
    positions: Tensor
    places: Tensor  # page * page size + offset of the position
    lengths: Tensor  # int32: positions + 1
    seeds: Tensor
    following: Tensor  # the position of the token to draw
    top_k: Tensor
    temperature: Tensor  # float32
    top_p: Tensor  # float32
    tables: Tensor  # [R, pages] int32


def read_rows(state: Tensor, tables: Tensor, index: Tensor, page_size: int) -> SequenceRows:
    """The state [7, S] and pages [S, pages] int32 of the sequences ``index`` [R]."""
    if by_triton(tables):
        from slime_core.kernels.steps_cuda import read_rows as kernel

        return SequenceRows(*kernel(state, tables, index, page_size))
    rows, columns = state.index_select(1, index), tables.index_select(0, index)
    position = rows[POSITION]
    pages = columns.gather(1, (position // page_size)[:, None])[:, 0].long()
    places = pages * page_size + position % page_size
    following = position + rows[ADVANCE]
    heat, p = (rows[number].int().view(torch.float32) for number in (TEMPERATURE, TOP_P))
    lengths = (position + 1).int()
    return SequenceRows(rows[TOKEN], position, places, lengths, rows[SEED], following, rows[TOP_K], heat, p, columns)


def move_on(
    state: Tensor, index: Tensor, rows: SequenceRows, tokens: Tensor, log_probs: Tensor, plain_log_probs: Tensor
) -> Tensor:
    """Let the drawn ``tokens`` [R] be the last of their sequences; the bits of all three as [3, R] int32."""
    if by_triton(log_probs):
        from slime_core.kernels.steps_cuda import move_on as kernel

        return kernel(state, index, rows.following, tokens, log_probs, plain_log_probs)
    state[: POSITION + 1].index_copy_(1, index, torch.stack([tokens, rows.following]))
    return torch.stack([tokens.int(), log_probs.view(torch.int32), plain_log_probs.view(torch.int32)])
