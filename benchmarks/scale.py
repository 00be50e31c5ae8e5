"""The numbers of docs/scale.md: what a very large run costs, measured at smaller sizes and carried to the target.

Nothing of the target size is written or read: windows and the indexed order are arithmetic, and run at their full size;
the rest is measured twice and extrapolated.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import common
from benchmarks.common import open_table, seconds

ALGORITHMS = ("lancedb", "indexed")
OURS, LANCEDB = "plan of this package", "lancedb's permutation builder"
ROW_BYTES = (64, 512, 20_000)
_ROWS_PER_ADD = 1_000_000


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = common.parser(__doc__, splits=4096, ranks=512, repeats=3, rows=10**9)
    parser.add_argument("--sizes", type=int, nargs=2, default=[1_000_000, 10_000_000], help="rows that are measured")
    args = parser.parse_args(argv)
    print(common.machine())
    with common.scratch() as directory:
        uris = {rows: _make_table(os.path.join(directory, str(rows)), rows) for rows in args.sizes}
        _report_windows(args)
        _report_planning(args, uris)
        _report_indexed(args, uris[args.sizes[0]])
        _report_addresses(args, uris)
        with common.local_ray(2):
            _report_published(args, uris)


def _make_table(uri: str, rows: int) -> str:
    """A table of ids alone, in fragments of a million rows."""
    import lancedb

    table = None
    for start in range(0, rows, _ROWS_PER_ADD):
        data = pa.table({"id": np.arange(start, min(start + _ROWS_PER_ADD, rows))})
        if table is None:
            table = lancedb.connect(uri).create_table(common.TABLE, data)
        else:
            table.add(data)
    return uri


def _spec(uri: str, splits: int, algorithm: str) -> Any:
    from lance_ray_stream.spec import make_spec

    return make_spec(open_table(uri), num_splits=splits, shuffle_algorithm=algorithm)


def _windows(rows: int, splits: int, ranks: int, row_bytes: int) -> list[Any]:
    """The windows of one rank over a whole epoch, as its feed cuts them."""
    from lance_ray_stream.datasource import max_window_rows
    from lance_ray_stream.feed import FIRST_WINDOW_ROWS
    from lance_ray_stream.position import windows

    widest = max_window_rows(row_bytes)
    position = np.zeros(splits // ranks, dtype=np.int64)
    due = len(position) * (rows // splits)
    return list(windows(position, num_rows=due, first_rows=min(FIRST_WINDOW_ROWS, widest), max_rows=widest))


def _report_windows(args: Any) -> None:
    lines = []
    _windows(args.splits, args.splits, args.splits, 1)  # the imports are not what is measured
    for ranks in (args.ranks, max(1, args.ranks // 64), 1):
        for row_bytes in ROW_BYTES:
            cut_all = partial(_windows, args.rows, args.splits, ranks, row_bytes)
            elapsed = seconds(cut_all)
            tracemalloc.start()
            cuts = cut_all()
            held = tracemalloc.get_traced_memory()[0] / common.MIB
            tracemalloc.stop()
            widest = max(cut.num_rows for cut in cuts)
            lines.append((ranks, row_bytes, f"{len(cuts):,}", f"{ranks * len(cuts):,}", f"{widest:,}", elapsed, held))
    common.print_table(
        f"Windows of an epoch: {args.rows:,} rows, {args.splits:,} splits; computed at full size",
        ("ranks", "row bytes", "read tasks per rank", "all ranks", "rows of the widest", "seconds", "held, MiB"),
        lines,
    )


def _report_planning(args: Any, uris: dict[int, str]) -> None:
    lines = []
    for rows, uri in uris.items():
        memory: dict[str, float] = {}
        contenders = {
            name: partial(_fresh, memory, name, function, uri, args.splits)
            for name, function in ((LANCEDB, _permute), (OURS, _plan))
        }
        found = common.run_turns(contenders, args.repeats)
        lines += [
            (f"{rows:,}", name, found.median(name), found.spread(name), found.ratio(name, LANCEDB), memory[name])
            for name in contenders
        ]
    common.print_table(
        f"Planning an epoch in the lancedb order, {args.splits:,} splits",
        ("rows", "planner", "seconds", "lowest..highest", "against lancedb", "more memory, MiB"),
        lines,
    )


def _fresh(memory: dict[str, float], name: str, function: Any, uri: str, splits: int) -> float:
    with common.processes(1) as alone:
        elapsed, more = alone.apply(function, (uri, splits))
    memory[name] = max(memory.get(name, 0.0), more)
    return float(elapsed)


def _peak_mib() -> float:
    """The highest resident set size of this program: ``ru_maxrss`` would begin with that of its parent."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def _permute(uri: str, splits: int) -> tuple[float, float]:
    from lancedb.permutation import permutation_builder

    # lancedb's default ends at about two million rows.
    os.environ["LANCEDB_PERM_BUILDER_MEMORY_LIMIT"] = str(2**34)
    table = open_table(uri)
    before = _peak_mib()
    elapsed = seconds(lambda: permutation_builder(table).split_random(fixed=splits, seed=0).execute().to_arrow())
    return elapsed, _peak_mib() - before


def _plan(uri: str, splits: int) -> tuple[float, float]:
    from lance_ray_stream.plan import build_plan

    spec = _spec(uri, splits, "lancedb")
    before = _peak_mib()
    return seconds(lambda: build_plan(spec, 0)), _peak_mib() - before


def _report_indexed(args: Any, uri: str) -> None:
    """The formula needs no rows, only their number."""
    lines = []
    for rows in (*args.sizes, args.rows):
        turns = []
        for _ in range(args.repeats):
            with common.processes(1) as alone:
                turns.append(alone.apply(_plan_indexed, (uri, args.splits, rows)))
        lines.append((f"{rows:,}", *(statistics.median(column) for column in zip(*turns, strict=True))))
    common.print_table(
        "The indexed order, at full size: an epoch's plan, and the addresses of one window of 131,072 rows",
        ("rows", "plan, ms", "window, ms", "more memory, MiB"),
        lines,
    )


def _plan_indexed(uri: str, splits: int, rows: int) -> tuple[float, float, float]:
    from lance_ray_stream.plan import build_plan

    spec = replace(_spec(uri, splits, "indexed"), total_rows=rows)
    generator = np.random.default_rng(0)
    split, index = generator.integers(0, splits, 131_072), generator.integers(0, rows // splits, 131_072)
    before = _peak_mib()
    planning = seconds(lambda: build_plan(spec, 1))
    plan = build_plan(spec, 0)
    reading = seconds(lambda: plan.order.at(split, index))
    return 1000 * planning, 1000 * reading, _peak_mib() - before


def _report_addresses(args: Any, uris: dict[int, str]) -> None:
    """What it costs that the indexed order asks for rows by offset."""
    from lance_ray_stream.plan import build_plan
    from lance_ray_stream.reader import read_rows

    lines = []
    for rows, uri in uris.items():
        table = _spec(uri, 1, "indexed").table.open()
        order = build_plan(_spec(uri, 1, "indexed"), 0).order
        cycles = np.arange(min(131_072, rows))
        offsets = order.at(np.zeros_like(cycles), cycles)
        row_ids = read_rows(table, offsets, columns=("_rowid",), address="offset")["_rowid"].to_numpy()
        found = common.run_turns(
            {
                "by row id": lambda t=table, r=row_ids: seconds(lambda: read_rows(t, r, columns=("id",))),
                "by offset": lambda t=table, o=offsets: seconds(
                    lambda: read_rows(t, o, columns=("id",), address="offset")
                ),
            },
            args.repeats,
        )
        lines += [(f"{rows:,}", name, found.median(name), found.ratio(name, "by row id")) for name in found.values]
    common.print_table(
        "Reading 131,072 random rows of 8 bytes", ("rows", "addressed", "seconds", "against row ids"), lines
    )


def _report_published(args: Any, uris: dict[int, str]) -> None:
    """What travels: plans to ranks, read tasks to workers, arrays to nodes."""
    import ray

    from lance_ray_stream.cursor import Cursor
    from lance_ray_stream.datasource import WindowDatasource
    from lance_ray_stream.layout import SplitLayout
    from lance_ray_stream.planner import PlannerActor
    from lance_ray_stream.progress import Progress

    lines = []
    for algorithm in ALGORITHMS:
        for rows, uri in uris.items():
            for splits in (args.splits // 8, args.splits):
                spec, planner = _spec(uri, splits, algorithm), PlannerActor.start()
                groups = [range(first, first + 8) for first in range(0, splits, 8)]
                plans = [planner.plan(spec, 0, group) for group in groups]
                asked = seconds(lambda p=planner, s=spec, g=groups: [p.plan(s, 0, group) for group in g]) / len(groups)
                plan, own = plans[0], plans[0].rows_to_fetch()
                cuts = _windows(rows, splits, splits // 8, 512)
                position = np.zeros(8, dtype=np.int64)
                source = WindowDatasource(spec, epoch=0, rows=own, position=position, windows=cuts, num_workers=1)
                tasks = [len(ray.cloudpickle.dumps(task)) for task in source.get_read_tasks(1)]
                stored = sum(ray.get(ref).nbytes for plan in plans for ref in plan.row_ids or ())
                cursor = Cursor(SplitLayout(splits), rank=0, world_size=1, epoch=0)
                state = len(json.dumps(Progress(spec, cursor, planner).state_dict()))
                sizes = (f"{len(ray.cloudpickle.dumps(plan)):,}", f"{max(tasks):,}", f"{state:,}")
                lines.append((algorithm, f"{rows:,}", f"{splits:,}", f"{stored:,}", *sizes, 1000 * asked))
    header = ("order", "rows", "splits", "bytes in the store", "plan as sent", "read task", "state", "a rank asks, ms")
    common.print_table("What is stored and sent, 8 splits per rank; bytes", header, lines)
    print(f"(a pickled Window is {len(pickle.dumps(cuts[0]))} bytes)")


if __name__ == "__main__":
    main()
