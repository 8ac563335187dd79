"""Samples by name, steps of them, and SQL on a ledger's file."""

import sqlite3

import numpy as np

from slime_core.types import Batch


def batch_of(version, ids):
    count = len(ids)
    empty = np.zeros(0)
    return Batch(
        version=version,
        sample_ids=list(ids),
        tasks=["default"] * count,
        group=np.zeros(count, np.int64),
        rollout=np.arange(count),
        reward=np.zeros(count),
        tokens=empty.astype(np.int32),
        offsets=np.zeros(count + 1, np.int64),
        loss_mask=empty.astype(np.float32),
        response_offsets=np.zeros(count + 1, np.int64),
    )


def ids_of(*groups):
    return [sample.id for group in groups for sample in group.samples]


def query(folder, text):
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        return db.execute(text).fetchall()
    finally:
        db.close()
