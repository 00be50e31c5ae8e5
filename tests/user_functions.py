"""Functions and classes that users give to ``map``, ``map_batches`` and ``TableRef``; workers import them from here."""

from __future__ import annotations

import asyncio
import os
import time

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.table import LanceTable


def double(batch):
    batch["twice"] = batch["id"] * 2
    return batch


SLOW_S = 0.2


def slow(batch):
    time.sleep(SLOW_S)
    return double(batch)


def widen(batch):
    batch["wide"] = [b"x" * 65_536] * len(batch["id"])
    return batch


def in_halves(batch):
    half = len(batch["id"]) // 2
    for part in (slice(None, half), slice(half, None)):
        yield double({name: column[part] for name, column in batch.items()})


def times(batch, factor, name="twice"):
    batch[name] = batch["id"] * factor
    return batch


class CallableObject:
    def __call__(self, batch):
        return double(batch)


class Doubler:
    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, batch):
        return times(batch, self.factor)


class HalvingDoubler(Doubler):
    def __call__(self, batch):
        yield from in_halves(batch)


class AsyncDoubler:
    async def __call__(self, batch):
        await asyncio.sleep(0.001 * (int(batch["id"][0]) % 5))
        return double(batch)


class AsyncHalvingDoubler:
    async def __call__(self, batch):
        for part in in_halves(batch):
            await asyncio.sleep(0.001)
            yield part


def arrow_double(rows: pa.Table) -> pa.Table:
    return rows.append_column("twice", pa.array(2 * rows["id"].to_numpy()))


def pandas_double(frame):
    return frame.assign(twice=frame["id"] * 2)


def add_a_row(batch):
    return {name: np.append(column, column[-1]) for name, column in batch.items()}


def drop_a_row(batch):
    return {name: column[1:] for name, column in batch.items()}


def drop_a_row_of_halves(batch):
    first, second = in_halves(batch)
    yield first
    yield drop_a_row(second)


def repeat_halves(batch):
    yield from in_halves(batch)
    yield from in_halves(batch)


def yield_nothing(batch):
    yield from ()


class Dropper:
    def __call__(self, batch):
        return drop_a_row(batch)


class AsyncDropper:
    async def __call__(self, batch):
        return drop_a_row(batch)


class AsyncGeneratorDropper:
    async def __call__(self, batch):
        yield drop_a_row(batch)


class OwnError(Exception):
    pass


def fail(batch):
    raise OwnError(f"cannot decode row {batch['id'][0]}")


class Failing:
    def __call__(self, batch):
        fail(batch)


def open_with_key(name: str) -> LanceTable:
    """A connection factory: the way in comes from the environment, and so does the key, which its error quotes."""
    key = os.environ.get("LRS_TEST_API_KEY")
    if key is None or "LRS_TEST_REFUSED" in os.environ:
        raise PermissionError(f"the key {key} was refused")
    table = lancedb.connect(os.environ["LRS_TEST_PLACE"]).open_table(name)
    assert isinstance(table, LanceTable)
    return table
