"""The pause between the last batch of an epoch and the first one of the next, beside the time that 20 batches take.

With ``--step-ms`` the trainer is busy with each batch for so long, and its own time is not part of the pause.
"""

from __future__ import annotations

import itertools
import os
import statistics

from benchmarks import common
from benchmarks.feed import Trainer


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    args = common.parser(
        __doc__, rows=200_000, row_bytes=512, splits=48, batch=4_800, repeats=5, step_ms=0, cpus=os.cpu_count() or 1
    ).parse_args(argv)
    print(common.machine())
    with common.scratch() as directory:
        uri = common.make_table(directory, rows=args.rows, row_bytes=args.row_bytes)
        with common.local_ray(args.cpus):
            trainer = Trainer(uri, splits=args.splits, batch=args.batch)
            # arrivals[e][i]: when batch i of epoch e came
            arrivals = trainer.arrivals(args.repeats + 1, args.step_ms / 1e3)
    pairs = list(itertools.pairwise(arrivals))
    gaps = [after[0] - before[-1] - args.step_ms / 1e3 for before, after in pairs]
    steps = [(epoch[-1] - epoch[0]) / (len(epoch) - 1) for epoch, _ in pairs]
    shares = [gap / (20 * step) for gap, step in zip(gaps, steps, strict=True)]
    common.print_table(
        f"Epoch boundary, {args.rows:,} rows of {args.row_bytes:,} bytes, batches of {args.batch:,}, "
        f"steps of {args.step_ms} ms",
        ("quantity", "median", "lowest..highest"),
        [
            ("pause between epochs, ms", 1e3 * statistics.median(gaps), _spread([1e3 * gap for gap in gaps])),
            ("one batch within an epoch, ms", 1e3 * statistics.median(steps), _spread([1e3 * step for step in steps])),
            ("pause as a share of 20 batches", statistics.median(shares), _spread(shares)),
        ],
    )


def _spread(values: list[float]) -> str:
    return f"{common.short(min(values))}..{common.short(max(values))}"


if __name__ == "__main__":
    main()
