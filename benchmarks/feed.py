"""The stream as one rank gets it, in whichever process iterates over it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ray

import lance_ray_stream as lrs
from benchmarks import common, contenders
from lance_ray_stream import datasource, feed
from lance_ray_stream.transforms import stream_of


def open_stream(dataset: Any, *, world_size: int = 1, rank: int = 0) -> Any:
    """A new stream of one rank, with a planner of its own."""
    return lrs.StreamDataConfig().configure({"train": dataset}, world_size)[rank]["train"]


def set_window_rows(rows: int, row_bytes: int) -> None:
    """Let the feeds of this process read windows of up to ``rows`` rows; 0 changes nothing."""
    if rows:
        datasource.MAX_WINDOW_ROWS = rows
        datasource.MAX_WINDOW_BYTES = rows * (row_bytes + 64)


def batches(stream: Any, batch: int, kind: str = "list", **options: Any) -> Iterator[Any]:
    """Tensors where the payload can become one, else Arrow tables."""
    if kind == "binary":
        return iter(stream.iter_batches(batch_size=batch, batch_format="pyarrow", **options))
    return iter(stream.iter_torch_batches(batch_size=batch, **options))


def num_rows(batch: Any) -> int:
    """Rows of one of those batches."""
    return batch.num_rows if hasattr(batch, "num_rows") else len(batch["id"])


def windows_of(dataset: Any, stream: Any) -> list[Any]:
    """The windows that the only rank of a stream reads in an epoch."""
    rows = datasource.max_window_rows(stream_of(dataset).spec.row_bytes)
    return contenders.feed_windows(
        stream.rows_per_split, stream.num_splits, first_rows=min(feed.FIRST_WINDOW_ROWS, rows), max_rows=rows
    )


class Epochs:
    """Whole epochs of one rank; the process that iterates is the trainer.

    ``options`` go to the ``iter_*`` method.
    """

    def __init__(self, uri: str, *, splits: int, batch: int, kind: str = "list", **options: Any) -> None:
        self.dataset = lrs.read_stream(common.open_table(uri), num_splits=splits)
        self.stream = open_stream(self.dataset)
        self._batch = batch
        self._kind = kind
        self._options = options
        # Workers started, table opened, epoch planned. A whole epoch: Ray ends the reader of an iteration that is left.
        self.rows_per_s()

    def _restart(self) -> None:
        self.stream.set_epoch(1)
        self.stream.set_epoch(0)

    def batches(self) -> Iterator[Any]:
        """What is left of the present epoch."""
        return batches(self.stream, self._batch, self._kind, **self._options)

    def windows(self) -> list[Any]:
        """The windows of an epoch."""
        return windows_of(self.dataset, self.stream)

    def rows_per_s(self, num_epochs: int = 1) -> float:
        """Rows per second over the whole epochs 0, 1 ...; the plan of the first one is known."""
        self._restart()
        every = (batch for _ in range(num_epochs) for batch in self.batches())
        return common.rows_per_s(every, num_rows)

    def arrivals(self, num_epochs: int, step_s: float = 0.0) -> list[list[float]]:
        """When each batch of each epoch came, in seconds; after each the trainer is busy for ``step_s``."""
        self._restart()
        return [[self._arrival(step_s) for _ in self.batches()] for _ in range(num_epochs)]

    def _arrival(self, step_s: float) -> float:
        now = time.perf_counter()
        time.sleep(step_s)
        return now


class Trainer:
    """:class:`Epochs` in an actor beside the readers, as Ray Train has it; there the next epoch is prepared."""

    def __init__(self, uri: str, **options: Any) -> None:
        self._actor = ray.remote(num_cpus=0)(Epochs).remote(uri, **options)

    def windows(self) -> list[Any]:
        """The windows of an epoch."""
        return ray.get(self._actor.windows.remote())

    def rows_per_s(self, num_epochs: int = 1) -> float:
        """As :meth:`Epochs.rows_per_s`."""
        return ray.get(self._actor.rows_per_s.remote(num_epochs))

    def arrivals(self, num_epochs: int, step_s: float = 0.0) -> list[list[float]]:
        """As :meth:`Epochs.arrivals`."""
        return ray.get(self._actor.arrivals.remote(num_epochs, step_s))
