"""How much of its speed a training loop keeps while the feed runs beside it.

The loop runs in an actor, as in Ray Train, on one CPU, and reads as fast as it trains. It is made slow enough to
need only ``1 / headroom`` of what the feed delivers by itself; the same steps over preloaded batches are the reference.
"""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks import common


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = common.parser(
        __doc__, rows=200_000, row_bytes=512, splits=48, batch=480, repeats=3, cpus=max(1, (os.cpu_count() or 1) - 1)
    )
    parser.add_argument("--headroom", type=float, default=2.0, help="what the feed could deliver over what is consumed")
    args = parser.parse_args(argv)
    print(common.machine())
    import ray

    with common.scratch() as directory:
        uri = common.make_table(directory, rows=args.rows, row_bytes=args.row_bytes)
        # One CPU more than the feed may use: the trainer's.
        with common.local_ray(args.cpus + 1):
            trainer = ray.remote(num_cpus=1)(Trainer).remote(uri, args.splits, args.batch)
            alone_s = ray.get(trainer.batch_seconds.remote())
            work = ray.get(trainer.calibrate.remote(args.headroom * alone_s))
            chosen = {
                PRELOADED: lambda: ray.get(trainer.preloaded.remote(work)),
                FED: lambda: ray.get(trainer.fed.remote(work)),
            }
            results = common.run_turns(chosen, args.repeats)
    common.print_table(
        f"Training loop, batches of {args.batch} rows of {args.row_bytes:,} bytes; the feed alone gives "
        f"{1 / alone_s:.0f} batches/s",
        ("batches", "steps/s", "lowest..highest", "kept"),
        [
            (name, results.median(name), results.spread(name), results.ratio(name, PRELOADED))
            for name in (PRELOADED, FED)
        ],
    )


PRELOADED, FED = "preloaded", "from the feed"


class Trainer:
    """A rank: an eager training loop of many small operations, which is what a busy neighbour hurts most."""

    def __init__(self, uri: str, splits: int, batch: int) -> None:
        import torch

        from benchmarks.feed import Epochs

        torch.set_num_threads(1)
        self._epochs = Epochs(uri, splits=splits, batch=batch)
        self._held = [batch for batch, _ in zip(self._epochs.batches(), range(8), strict=False)]
        width = self._held[0]["x"].shape[1]
        self._model = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def batch_seconds(self) -> float:
        """Seconds per batch that the feed needs when nothing else runs."""
        return self._epochs.stream.local_batch_size(len(self._held[0]["id"])) / self._epochs.rows_per_s()

    def calibrate(self, step_s: float) -> int:
        """Passes per step that make a step take about ``step_s``."""
        start = time.perf_counter()
        for i in range(20):
            self._step(self._held[i % 8], 1)
        return max(1, round(step_s / ((time.perf_counter() - start) / 20)))

    def preloaded(self, work: int) -> float:
        """Steps per second over batches that are in memory."""
        count = min(400, self._epochs.stream.rows_per_epoch // len(self._held[0]["id"]))
        return self._steps((self._held[i % 8] for i in range(count)), work)

    def fed(self, work: int) -> float:
        """Steps per second over an epoch of the feed, from the first batch on."""
        self._epochs.stream.set_epoch(1)
        self._epochs.stream.set_epoch(0)
        batches = self._epochs.batches()
        next(batches)
        return self._steps(batches, work)

    def _steps(self, batches: Any, work: int) -> float:
        start, count = time.perf_counter(), 0
        for batch in batches:
            self._step(batch, work)
            count += 1
        return count / (time.perf_counter() - start)

    def _step(self, batch: dict[str, Any], work: int) -> None:
        for _ in range(work):
            self._optimizer.zero_grad()
            inputs = batch["x"].float() / 255
            self._model(inputs).square().mean().backward()
            self._optimizer.step()


if __name__ == "__main__":
    main()
