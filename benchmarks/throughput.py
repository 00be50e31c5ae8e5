"""Rows per second of one rank over whole epochs, beside its limit lines and other loaders."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import common, contenders
from benchmarks.feed import Epochs, Trainer, set_window_rows

FEED, BARE, LANCEDB = "this feed", "bare read of the same windows", "StreamingDataset"


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = common.parser(
        __doc__,
        rows=500_000,
        row_bytes=512,
        splits=48,
        batch=4_800,
        repeats=3,
        epochs=3,
        cpus=os.cpu_count() or 1,
        window_rows=0,
        object_store_mib=1024,
    )
    parser.add_argument("--kind", choices=("list", "binary"), default="list", help="type of the payload")
    parser.add_argument("--limit-s", type=float, default=60.0, help="stop a slow loader after this many seconds")
    parser.add_argument("--no-lancedb", action="store_true", help="leave StreamingDataset out")
    parser.add_argument("--peers", nargs="*", default=[], help="other loaders: " + ", ".join(PEERS))
    args = parser.parse_args(argv)
    print(common.machine())
    with common.scratch() as directory:
        uri = common.make_table(directory, rows=args.rows, row_bytes=args.row_bytes, kind=args.kind)
        with (
            common.processes(1) as alone,
            common.processes(args.cpus) as several,
            common.local_ray(args.cpus, args.object_store_mib),
        ):
            report(args, common.run_turns(make_contenders(args, uri, alone, several), args.repeats))


def make_contenders(args: argparse.Namespace, uri: str, alone: Any, several: Any) -> dict[str, Callable[[], float]]:
    """What runs in each turn."""
    set_window_rows(args.window_rows, args.row_bytes)
    # The width of windows can be set in this process alone.
    place = Epochs if args.window_rows else Trainer
    trainer = place(uri, splits=args.splits, batch=args.batch, kind=args.kind)
    cuts = trainer.windows()
    for pool, count in ((alone, 1), (several, args.cpus)):
        pool.map(partial(contenders.prepare, uri), [args.splits] * count, chunksize=1)
    chosen: dict[str, Callable[[], float]] = {
        FEED: partial(trainer.rows_per_s, args.epochs),
        f"{BARE}, {args.cpus} processes": partial(_bare, several, uri, args.splits, cuts, args.cpus),
        f"{BARE}, 1 process": partial(_bare, alone, uri, args.splits, cuts, 1),
        "plain scan, 1 process": lambda: alone.apply(contenders.scan, (uri,)),
    }
    if not args.no_lancedb:
        chosen |= _lancedb(args, uri, alone)
    return chosen


def _bare(pool: Any, uri: str, splits: int, cuts: list[Any], count: int) -> float:
    shares = [cuts[i::count] for i in range(count)]
    rows: list[int] = []
    elapsed = common.seconds(lambda: rows.extend(pool.map(partial(contenders.read_bare, uri, splits), shares, 1)))
    return sum(rows) / elapsed


def _lancedb(args: argparse.Namespace, uri: str, alone: Any) -> dict[str, Callable[[], float]]:
    """Defaults, and the best of a few settings with the same splits and with one."""
    measure = partial(_streaming_dataset, args, uri, alone)
    forms = ["tensor"] if args.kind == "list" else ["arrow", "bytes"]
    chosen = {f"{LANCEDB}, defaults": partial(measure, args.splits, {"form": "dict"}, args.limit_s)}
    for splits in (args.splits, 1):
        settings = [
            {"form": form, "read_batch_size": rows, "io_queue_depth": depth}
            for form in forms
            for rows, depth in _SETTINGS[args.kind, splits == 1]
        ]
        rates = [measure(splits, tuning, args.limit_s) for tuning in settings]
        best = settings[rates.index(max(rates))]
        print(f"  best of {len(settings)} settings of {LANCEDB} with {splits} splits: {best}", flush=True)
        chosen[f"{LANCEDB}, tuned, {splits} splits"] = partial(measure, splits, best, args.limit_s)
    return chosen


# read_batch_size and io_queue_depth that are tried, by type of the rows and whether there is one split only. Of many
# splits each has its own queue: more rows or reads than these cost memory and threads, and are slower.
_SETTINGS = {
    ("list", False): [(1_024, 1), (4_096, 1)],
    ("list", True): [(4_096, 4), (16_384, 4)],
    ("binary", False): [(64, 1), (256, 1)],
    ("binary", True): [(256, 4), (1_024, 2)],
}


def _streaming_dataset(
    args: argparse.Namespace, uri: str, alone: Any, splits: int, tuning: dict[str, Any], limit_s: float
) -> float:
    return alone.apply(contenders.streaming_dataset, (uri, splits, args.batch, limit_s, tuning))


PEERS: dict[str, Any] = {}


def report(args: argparse.Namespace, results: common.Results) -> None:
    """The table: medians, and the ratio of the feed to each contender within a turn."""
    common.print_table(
        f"{args.rows:,} rows of {args.row_bytes:,} bytes ({args.kind}), {args.splits} splits, batch {args.batch:,}",
        ("loader", "thousand rows/s", "lowest..highest", "feed / loader"),
        [
            (name, results.median(name) / 1e3, results.spread(name), f"{results.ratio(FEED, name):.2f}")
            for name in results.values
        ],
    )


if __name__ == "__main__":
    main()
