"""What a rank's stream is doing: counts and times for ``stats()``, Ray's metrics, and one progress line."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

from ray.util.metrics import Counter, Gauge

# Seconds between two updates of the metrics, and between two progress lines.
_METRICS_EVERY_S = 1.0
_PROGRESS_EVERY_S = 10.0


@dataclass(kw_only=True)
class Meter:
    """Counts and times of one iteration, measured where batches are handed over.

    Attributes:
        rows, batches: handed to the trainer.
        bytes: of the blocks that they came in.
        wait_s: seconds the trainer waited for a batch.
        train_s: seconds between two batches, which are the trainer's own.
    """

    rows: int = 0
    batches: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    train_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds since the iteration began to wait for its first batch."""
        return self.wait_s + self.train_s

    @property
    def rows_per_s(self) -> float:
        """Rows per second over the whole iteration; 0 before the first batch."""
        return self.rows / self.total_s if self.total_s else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that the trainer waited for data, 0 to 1."""
        return self.wait_s / self.total_s if self.total_s else 0.0

    def timed(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """``batches``, with the time before and after each one measured."""
        asked = time.perf_counter()
        for batch in batches:
            given = time.perf_counter()
            self.wait_s += given - asked
            self.batches += 1
            yield batch
            asked = time.perf_counter()
            self.train_s += asked - given
        self.wait_s += time.perf_counter() - asked


class Insight:
    """The meter of the latest iteration of one rank, and where it is shown.

    Args:
        name: of the dataset in the trainer.
        rank: of the trainer's worker; rank 0 shows the progress line.
        progress: whether it does.
    """

    def __init__(self, name: str, rank: int, *, progress: bool) -> None:
        self.name = name
        self.rank = rank
        self.meter = Meter()
        self._progress = progress and rank == 0
        self._shown: float | None = None
        self._published = 0.0
        self._reported = Meter()

    def observe(
        self, batches: Iterable[Any], *, epoch: int, first_step: int, num_steps: int
    ) -> Generator[Any, None, None]:
        """``batches`` of one iteration, measured by a new meter and shown; closed with this generator.

        Args:
            first_step: of the epoch, from 1; later than that where the iteration goes on from a position.
            num_steps: of the whole epoch.
        """
        self.meter, self._reported = Meter(), Meter()
        self._published = begun = time.perf_counter()
        # Kept from one iteration to the next: short ones share a line, or have none.
        self._shown = begun if self._shown is None else self._shown
        timed = self.meter.timed(batches)
        try:
            for step, batch in enumerate(timed, start=first_step):
                now = time.perf_counter()
                if now - self._published >= _METRICS_EVERY_S:
                    self._published = now
                    self._publish(epoch)
                if now - self._shown >= _PROGRESS_EVERY_S and step < num_steps:
                    self._shown = now
                    self._show(epoch, step, num_steps)
                yield batch
            now = time.perf_counter()
            if now - min(begun, self._shown) >= _PROGRESS_EVERY_S:
                self._shown = now
                self._show(epoch, num_steps, num_steps)
        finally:
            timed.close()
            self._publish(epoch)

    def _show(self, epoch: int, step: int, num_steps: int) -> None:
        if self._progress:
            line = progress_line(self.name, self.meter, epoch=epoch, step=step, num_steps=num_steps)
            # As progress bars do: a logger of ours would be silent in a Ray Train worker.
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def _publish(self, epoch: int) -> None:
        tags = {"dataset": self.name, "rank": str(self.rank)}
        metrics = _metrics()
        for key in ("rows", "batches", "bytes", "wait_s", "train_s"):
            grown = getattr(self.meter, key) - getattr(self._reported, key)
            if grown > 0:
                metrics[key].inc(grown, tags=tags)
                setattr(self._reported, key, getattr(self.meter, key))
        metrics["epoch"].set(epoch, tags=tags)


def summarize(
    meter: Meter,
    *,
    table_rows: int,
    rows: int,
    num_splits: int,
    task_seconds: Iterable[tuple[str, float]],
    delivery_seconds: Iterable[tuple[str, float]],
) -> str:
    """What ``stats()`` says of an iteration.

    Args:
        table_rows: of the pinned version.
        rows: N, those that pass the filter.
        task_seconds: of the read and of each transform, summed over tasks that ran beside each other.
        delivery_seconds: of each stage between the arrival of blocks and the hand-over of batches, in the background.
    """
    lines = [
        f"rows: {table_rows:,} in the table, {rows:,} after the filter, {rows // num_splits:,} in each of "
        f"{num_splits:,} splits, {rows % num_splits:,} dropped from the epoch",
        f"delivered to this rank: {meter.rows:,} rows in {meter.batches:,} batches, of blocks of {meter.bytes:,} bytes",
        f"waiting for data: {meter.wait_s:.2f} s ({meter.wait_share:.0%}); in the training loop: {meter.train_s:.2f} s",
        f"read and transform tasks: {_seconds(task_seconds)}",
        f"delivery, in the background: {_seconds(delivery_seconds)}",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _seconds(parts: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts) or "not known yet"


def progress_line(name: str, meter: Meter, *, epoch: int, step: int, num_steps: int) -> str:
    """Where the run is, how fast it reads, and how much of its time it waits for data."""
    return (
        f"{name}: epoch {epoch}, step {step} of {num_steps}, {meter.rows_per_s:,.0f} rows/s per rank, "
        f"waiting for data {meter.wait_share:.0%} of the time"
    )


_known: dict[str, Any] = {}


def _metrics() -> dict[str, Any]:
    """The metrics of this process: Ray registers each name once. They show in Ray's dashboard and Prometheus."""
    if not _known:
        keys = ("dataset", "rank")
        texts = {
            "rows": "Rows handed to the trainer",
            "batches": "Batches handed to the trainer",
            "bytes": "Bytes of the blocks that the batches came in",
            "wait_s": "Seconds the trainer waited for data",
            "train_s": "Seconds between two batches",
        }
        for key, text in texts.items():
            unit = key.replace("_s", "_seconds")
            _known[key] = Counter(f"lance_ray_stream_{unit}_total", description=text, tag_keys=keys)
        _known["epoch"] = Gauge("lance_ray_stream_epoch", description="Epoch that is delivered", tag_keys=keys)
    return _known
