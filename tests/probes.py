"""What the Ray tests watch streams with: iterators of all ranks, LanceDB's own order, slow and recorded tables."""

from __future__ import annotations

import json
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from lancedb.streaming import StreamingDataset
from lancedb.table import LanceTable
from ray.data import Dataset

from lance_ray_stream import EpochPlan, StreamDataConfig, StreamIterator, TableRef
from lance_ray_stream.plan import build_plan
from lance_ray_stream.planner import LocalPlanner
from lance_ray_stream.spec import StreamSpec

State = dict[str, Any]


def iterators(dataset: Dataset, world_size: int, *, num_workers: int = 1) -> list[StreamIterator]:
    """The iterators of all ranks, planned in this process: what ``configure()`` makes, without its actor."""
    config = StreamDataConfig(num_workers=num_workers)
    return config.iterators("train", dataset, world_size, planner=LocalPlanner())


def iterator(dataset: Dataset, **topology: int) -> StreamIterator:
    """The iterator of a single rank."""
    return iterators(dataset, 1, **topology)[0]


def configured(dataset: Dataset, world_size: int, config: StreamDataConfig | None = None) -> list[StreamIterator]:
    """The iterators of all ranks as Ray Train gets them, planned by an actor."""
    shards = (config or StreamDataConfig()).configure({"train": dataset}, world_size)
    return [cast(StreamIterator, shard["train"]) for shard in shards]


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that are planned in this process from now on."""
    planned: list[int] = []

    def counted(spec: StreamSpec, epoch: int) -> EpochPlan:
        planned.append(epoch)
        return build_plan(spec, epoch)

    monkeypatch.setattr("lance_ray_stream.planner.build_plan", counted)
    return planned


def batches(stream: StreamIterator, **options: Any) -> list[list[int]]:
    """The ids of each batch of one iteration."""
    return [batch["id"].tolist() for batch in stream.iter_batches(**options)]


def rows(stream: StreamIterator, **options: Any) -> list[int]:
    """The ids of one iteration, in order."""
    return [i for batch in batches(stream, **options or {"batch_size": 1000}) for i in batch]


def take(stream: StreamIterator, num_batches: int, **options: Any) -> list[list[int]]:
    """The ids of the next ``num_batches`` batches; then the loop is left, as a trainer that stops there does."""
    taken = []
    if num_batches:
        for batch in stream.iter_batches(**options):
            taken.append(batch["id"].tolist())
            if len(taken) == num_batches:
                break
    return taken


def global_sets(per_rank: list[list[list[int]]]) -> list[list[int]]:
    """(rank, step) -> ids to step -> the sorted ids of all ranks."""
    return [sorted(i for batch in step for i in batch) for step in zip(*per_rank, strict=True)]


def oracle(table: LanceTable, num_splits: int, *, rank: int = 0, world_size: int = 1, **options: Any) -> list[int]:
    """The ids that LanceDB's own loader delivers to one rank, in order."""
    stream = StreamingDataset(table, num_splits=num_splits, rank=rank, world_size=world_size, columns=["id"], **options)
    return [row["id"] for row in stream]


def in_steps(ids: list[int], size: int) -> list[list[int]]:
    """Runs of ``size`` ids."""
    return [ids[start : start + size] for start in range(0, len(ids), size)]


class SlowTable(TableRef):
    """A table that every read task opens after a random delay of up to 0.3 s, the first task after 1 s."""

    def open(self) -> LanceTable:
        """As ``TableRef.open``."""
        if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            try:
                Path(self.uri, ".first").touch(exist_ok=False)
                time.sleep(1.0)
            except FileExistsError:
                time.sleep(random.SystemRandom().uniform(0, 0.3))
        return super().open()


class RecordedTable(TableRef):
    """A table that keeps a log of the rows that are read from it, by any process."""

    def open(self) -> LanceTable:
        """As ``TableRef.open``."""
        table = super().open()
        if "take_row_ids" not in vars(table):
            take_row_ids = table.take_row_ids
            vars(table)["take_row_ids"] = lambda ids: _Query(take_row_ids(ids), self.on_read, len(ids))
        return table

    def on_read(self, num_rows: int, columns: list[str] | None) -> None:
        """Called in the reading process right before it reads."""
        with self._log.open("a") as log:
            log.write(json.dumps([num_rows, columns]) + "\n")

    @property
    def _log(self) -> Path:
        return Path(self.uri, "reads.log")

    def reads(self) -> Iterator[tuple[int, list[str] | None]]:
        """Every read of rows so far: how many, and which columns (None: all)."""
        for line in self._log.read_text().splitlines() if self._log.exists() else []:
            num_rows, columns = json.loads(line)
            if num_rows:
                yield num_rows, columns

    def rows_read(self) -> int:
        """The number of rows that were read so far."""
        return sum(num_rows for num_rows, _ in self.reads())

    def forget(self) -> None:
        """Start a new log."""
        self._log.unlink(missing_ok=True)


class CountedPlans(TableRef):
    """A table that keeps a log of the plans that are built from it, by any process."""

    def open(self) -> LanceTable:
        """As ``TableRef.open``."""
        if any(frame.name == build_plan.__name__ for frame in traceback.extract_stack()):
            with self._log.open("a") as log:
                log.write(f"{os.getpid()}\n")
        return super().open()

    @property
    def _log(self) -> Path:
        return Path(self.uri, "plans.log")

    def builders(self) -> list[int]:
        """For every plan so far, the process that built it."""
        return [int(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []


class ControllerOfRun:
    """What Ray Train's does with a config."""

    def __init__(self, config: StreamDataConfig) -> None:
        self._config = config

    def planners_of_two_starts(self) -> list[str | None]:
        """The actors that are known where the config is sent at each start of the workers."""
        sent = [pickle.loads(ray.cloudpickle.dumps(self._config))._planner.actor for _ in range(2)]
        return [actor and actor._handle._actor_id.hex() for actor in sent]


class _Query:
    """A query of rows by id that says so when it is run."""

    def __init__(self, query: Any, on_read: Callable[[int, list[str] | None], None], num_rows: int) -> None:
        self._query, self._on_read, self._num_rows = query, on_read, num_rows
        self._columns: list[str] | None = None

    def with_row_id(self) -> _Query:
        self._query = self._query.with_row_id()
        return self

    def select(self, columns: list[str]) -> _Query:
        self._query, self._columns = self._query.select(columns), list(columns)
        return self

    def to_arrow(self) -> Any:
        self._on_read(self._num_rows, self._columns)
        return self._query.to_arrow()
