"""Memory of the whole process tree (trainer, readers, object store) while an epoch is read, for growing tables.

Proportional set size: memory that processes share counts once. Ray's own processes are in it, and shown apart.
"""

from __future__ import annotations

import os

from benchmarks import common
from benchmarks.feed import Epochs


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = common.parser(__doc__, row_bytes=512, splits=48, batch=4_800, cpus=os.cpu_count() or 1, window_rows=0)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[250_000, 500_000, 1_000_000], help="rows of the tables"
    )
    parser.add_argument("--epochs", type=int, default=1, help="epochs that are read of each table")
    args = parser.parse_args(argv)
    print(common.machine())
    lines = []
    for rows in args.sizes:
        with common.scratch() as directory, common.processes(1) as alone:
            lines.append(alone.apply(_measure, (directory, rows, args)))
    common.print_table(
        f"Memory, rows of {args.row_bytes:,} bytes, MiB of proportional set size",
        ("rows", "payload", "idle Ray", "warm readers", "peak of the epochs", "at the end"),
        lines,
    )


def _measure(directory: str, rows: int, args: object) -> tuple:
    from benchmarks.feed import set_window_rows

    uri = common.make_table(directory, rows=rows, row_bytes=args.row_bytes)
    set_window_rows(args.window_rows, args.row_bytes)
    with common.local_ray(args.cpus):
        idle = common.tree_pss_mib()
        epochs = Epochs(uri, splits=args.splits, batch=args.batch)
        warm = common.tree_pss_mib()
        with common.PeakMemory() as peak:
            for _ in range(args.epochs):
                epochs.rows_per_s()
        return f"{rows:,}", rows * args.row_bytes / common.MIB, idle, warm, peak.mib, common.tree_pss_mib()


if __name__ == "__main__":
    main()
