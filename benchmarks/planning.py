"""Seconds and memory to plan an epoch, beside LanceDB's own permutation; each in a fresh process."""

from __future__ import annotations

import os
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


def _report_indexed(args: object) -> None:
    from lance_ray_stream.spec import SHUFFLE_ALGORITHMS

    if "indexed" not in SHUFFLE_ALGORITHMS:
        print('shuffle_algorithm="indexed" is skipped: this version has no such algorithm')


if __name__ == "__main__":
    main()
