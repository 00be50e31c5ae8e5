"""Rows per second of all ranks together, for growing numbers of ranks and of reader CPUs; every rank is an actor."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks import common


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = common.parser(__doc__, rows=300_000, row_bytes=512, splits=48, batch=2_400, repeats=3)
    cpus = os.cpu_count() or 1
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--reader-cpus", type=int, nargs="+", default=sorted({1, cpus}), help="CPUs of all feeds")
    args = parser.parse_args(argv)
    print(common.machine())
    results = common.Results()
    with common.scratch() as directory:
        uri = common.make_table(directory, rows=args.rows, row_bytes=args.row_bytes)
        for reader_cpus in args.reader_cpus:
            with common.local_ray(reader_cpus):
                for _ in range(args.repeats):
                    for ranks in args.ranks:
                        results.add(f"{ranks} ranks, {reader_cpus} CPUs", _all_ranks(uri, ranks, args))
    first = next(iter(results.values))
    common.print_table(
        f"Ranks and reader CPUs, {args.rows:,} rows of {args.row_bytes:,} bytes",
        ("topology", "thousand rows/s of all ranks", "lowest..highest", "against the first"),
        [
            (name, results.median(name) / 1e3, results.spread(name), results.ratio(name, first))
            for name in results.values
        ],
    )


def _all_ranks(uri: str, ranks: int, args: Any) -> float:
    """Rows per second over one epoch, all ranks starting together."""
    import ray

    import lance_ray_stream as lrs

    dataset = lrs.read_stream(common.open_table(uri), num_splits=args.splits)
    streams = lrs.StreamDataConfig().configure({"train": dataset}, ranks)
    actors = [ray.remote(num_cpus=0)(Rank).remote(streams[rank]["train"], args.batch // ranks) for rank in range(ranks)]
    ray.get([actor.warm.remote() for actor in actors])
    start = time.perf_counter()
    rows = sum(ray.get([actor.epoch.remote() for actor in actors]))
    return rows / (time.perf_counter() - start)


class Rank:
    """A trainer that does nothing but receive."""

    def __init__(self, stream: Any, batch: int) -> None:
        self._stream = stream
        self._batch = batch

    def warm(self) -> None:
        """Receive one batch, and forget it."""
        next(iter(self._stream.iter_torch_batches(batch_size=self._batch)))
        self._stream.set_epoch(1)
        self._stream.set_epoch(0)

    def epoch(self) -> int:
        """Receive an epoch; returns its rows."""
        return sum(len(batch["id"]) for batch in self._stream.iter_torch_batches(batch_size=self._batch))


if __name__ == "__main__":
    main()
