"""Seconds and memory to plan an epoch, beside LanceDB's own permutation; each in a fresh process."""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial

from benchmarks import common
from benchmarks.common import open_table, peak_rss_mib, seconds

OURS, LANCEDB = 'plan, "lancedb"', "lancedb's permutation builder"


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = common.parser(__doc__, splits=48, repeats=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000], help="rows of the tables")
    parser.add_argument(
        "--indexed-sizes", type=int, nargs="+", default=[10_000_000, 1_000_000_000], help='rows for "indexed"'
    )
    args = parser.parse_args(argv)
    print(common.machine())
    lines = []
    for rows in args.sizes:
        with common.scratch() as directory:
            uri = common.make_table(directory, rows=rows, row_bytes=1)
            memory: dict[str, float] = {}
            contenders = {
                name: partial(_fresh, memory, name, function, uri, args.splits)
                for name, function in ((LANCEDB, _permute), (OURS, _plan))
            }
            results = common.run_turns(contenders, args.repeats)
        lines += [
            (f"{rows:,}", name, results.median(name), results.spread(name), results.ratio(name, LANCEDB), memory[name])
            for name in results.values
        ]
    common.print_table(
        f"Planning an epoch, {args.splits} splits",
        ("rows", "planner", "seconds", "lowest..highest", "against lancedb", "more memory, MiB"),
        lines,
    )
    _report_indexed(args)


def _fresh(memory: dict[str, float], name: str, function: object, uri: str, splits: int) -> float:
    with common.processes(1) as alone:
        elapsed, memory[name] = alone.apply(function, (uri, splits))
    return elapsed


def _permute(uri: str, splits: int) -> tuple[float, float]:
    from lancedb.permutation import permutation_builder

    # lancedb's default ends at about two million rows.
    os.environ["LANCEDB_PERM_BUILDER_MEMORY_LIMIT"] = str(2**34)
    table = open_table(uri)
    before = peak_rss_mib()
    elapsed = seconds(lambda: permutation_builder(table).split_random(fixed=splits, seed=0).execute().to_arrow())
    return elapsed, peak_rss_mib() - before


def _plan(uri: str, splits: int) -> tuple[float, float]:
    from lance_ray_stream.plan import build_plan
    from lance_ray_stream.spec import make_spec

    spec = make_spec(open_table(uri), num_splits=splits)
    before = peak_rss_mib()
    return seconds(lambda: build_plan(spec, 0)), peak_rss_mib() - before


def _report_indexed(args: argparse.Namespace) -> None:
    """The indexed plan needs no rows, only their number: tables of a size that cannot be written here."""
    lines = []
    for rows in args.indexed_sizes:
        seconds_, memory = [], []
        for _ in range(args.repeats):
            with common.processes(1) as alone:
                elapsed, more = alone.apply(_plan_indexed, (rows, args.splits))
            seconds_.append(elapsed)
            memory.append(more)
        lines.append((f"{rows:,}", statistics.median(seconds_), statistics.median(memory)))
    common.print_table(
        'Plan and rows of the first 100 steps, "indexed"',
        ("rows", "seconds", "more memory, MiB"),
        lines,
    )


def _plan_indexed(rows: int, splits: int) -> tuple[float, float]:
    from dataclasses import replace

    import numpy as np

    from lance_ray_stream.plan import build_plan
    from lance_ray_stream.spec import make_spec

    with common.scratch() as directory:
        common.make_table(directory, rows=splits, row_bytes=1)
        spec = make_spec(open_table(directory), num_splits=splits, shuffle_algorithm="indexed")
        spec = replace(spec, total_rows=rows)
        before = peak_rss_mib()

        def plan() -> None:
            order = build_plan(spec, 0).order
            for start in range(0, 10_000, 100):
                order.at(np.tile(np.arange(splits), 100), np.repeat(np.arange(start, start + 100), splits))

        return seconds(plan), peak_rss_mib() - before


if __name__ == "__main__":
    main()
