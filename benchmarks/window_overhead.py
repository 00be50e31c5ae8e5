"""What a window costs besides its rows: epochs of tiny rows, cut into fewer and into more windows.

The cost of a window is the slope of the time of an epoch over its number of windows. The bare read is beside it.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np

from benchmarks import common, contenders
from benchmarks.feed import Epochs, set_window_rows, windows_of


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = common.parser(__doc__, rows=50_000, splits=48, batch=4_800, repeats=3, cpus=os.cpu_count() or 1)
    parser.add_argument("--window-rows", type=int, nargs="+", default=[480, 960, 4_800], help="rows of the windows")
    args = parser.parse_args(argv)
    print(common.machine())
    with common.scratch() as directory, common.processes(1) as alone:
        uri = common.make_table(directory, rows=args.rows, row_bytes=1)
        alone.apply(contenders.prepare, (uri, args.splits))
        with common.local_ray(args.cpus):
            epochs = Epochs(uri, splits=args.splits, batch=args.batch)
            counts = {rows: len(_cut(epochs, rows)) for rows in args.window_rows}
            chosen = {}
            for rows in args.window_rows:
                chosen[f"feed {rows}"] = partial(_feed, epochs, rows)
                chosen[f"bare {rows}"] = partial(_bare, alone, uri, args.splits, _cut(epochs, rows))
            results = common.run_turns(chosen, args.repeats)
    lines = [
        (kind, counts[rows], rows, 1e3 * results.median(f"{kind} {rows}"), results.spread(f"{kind} {rows}"))
        for kind in ("feed", "bare")
        for rows in args.window_rows
    ]
    common.print_table("Epochs of tiny rows", ("reading", "windows", "rows each", "ms", "lowest..highest, s"), lines)
    for kind in ("feed", "bare"):
        times = [results.median(f"{kind} {rows}") for rows in args.window_rows]
        slope = np.polyfit([counts[rows] for rows in args.window_rows], times, 1)[0]
        print(f"{kind}: {1e3 * slope:.1f} ms for each window")


def _cut(epochs: Epochs, rows: int) -> list[Any]:
    set_window_rows(rows, 16)
    return windows_of(epochs.dataset, epochs.stream)


def _feed(epochs: Epochs, rows: int) -> float:
    set_window_rows(rows, 16)
    return epochs.stream.rows_per_epoch / epochs.rows_per_s()


def _bare(alone: Any, uri: str, splits: int, cuts: list[Any]) -> float:
    return common.seconds(lambda: alone.apply(contenders.read_bare, (uri, splits, cuts)))


if __name__ == "__main__":
    main()
