"""Seconds until the first batch: of a fresh stream, and of one that resumes at 90 % of the epoch.

Both are new streams with a planner of their own, in a Ray whose workers are warm: what is timed is what a restarted
job waits for, planning included.
"""

from __future__ import annotations

import os

import numpy as np

from benchmarks import common
from benchmarks.feed import open_stream

FRESH, RESUMED = "fresh epoch", "resume at 90 %"


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    import lance_ray_stream as lrs

    args = common.parser(
        __doc__, rows=500_000, row_bytes=512, splits=48, batch=4_800, repeats=5, cpus=os.cpu_count() or 1
    ).parse_args(argv)
    print(common.machine())
    with common.scratch() as directory:
        uri = common.make_table(directory, rows=args.rows, row_bytes=args.row_bytes)
        with common.local_ray(args.cpus):
            dataset = lrs.read_stream(common.open_table(uri), num_splits=args.splits)
            state = _state_at(open_stream(dataset), 0.9)

            def first(saved: dict | None) -> float:
                stream = open_stream(dataset)

                def begin() -> None:
                    if saved is not None:
                        stream.load_state_dict(saved)
                    next(iter(stream.iter_torch_batches(batch_size=args.batch)))

                return common.seconds(begin)

            first(None)  # workers started, table opened
            results = common.run_turns({FRESH: lambda: first(None), RESUMED: lambda: first(state)}, args.repeats)
    common.print_table(
        f"First batch of {args.batch:,}, {args.rows:,} rows of {args.row_bytes:,} bytes",
        ("start", "seconds", "lowest..highest", "against fresh"),
        [(name, results.median(name), results.spread(name), results.ratio(name, FRESH)) for name in results.values],
    )


def _state_at(stream: object, part: float) -> dict:
    """The state of ``stream`` after ``part`` of its epoch."""
    state = stream.state_dict()
    position = int(stream.rows_per_split * part)
    consumed = np.full(stream.num_splits, position).tolist()
    return state | {"samples_consumed_per_split": consumed, "positions_consumed_per_split": consumed}


if __name__ == "__main__":
    main()
