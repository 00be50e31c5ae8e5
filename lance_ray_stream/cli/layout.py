"""``layout``: legal topologies of a number of splits."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from lance_ray_stream.cli.output import show, write_csv, write_json, write_table
from lance_ray_stream.errors import InvalidArgumentError, LayoutError, NotEnoughRowsError
from lance_ray_stream.layout import SplitLayout, check_int
from lance_ray_stream.position import num_batches


def run(arguments: Namespace) -> int:
    """One line per world size; what is the same for all of them stands above."""
    layout = _layout(arguments)
    lines = [_topology(layout, size, arguments) for size in _world_sizes(layout, arguments)]
    epoch = _epoch(layout, arguments)
    if arguments.format == "json":
        facts = {"num_splits": layout.num_splits, "uneven": layout.uneven, **epoch}
        write_json({**facts, "topologies": [_keys(line) for line in lines]})
        return 0
    header, rows = list(lines[0]), [list(line.values()) for line in lines]
    if arguments.format == "csv":
        write_csv([*_keys(lines[0]), *epoch], [[*row, *epoch.values()] for row in rows])
        return 0
    uneven, plural = ", uneven" * layout.uneven, "s" * (len(lines) != 1)
    print(f"num_splits {layout.num_splits}{uneven}: {len(lines)} world size{plural}")
    if "rows_per_split" in epoch:
        print(
            f"an epoch of {show(arguments.rows)} rows: {show(epoch['rows_per_split'])} per split, "
            f"{show(epoch['dropped_rows'])} dropped"
        )
    if "steps" in epoch:
        print(f"{show(epoch['steps'])} steps of {show(arguments.global_batch_size)} rows", end="")
        short = epoch["last_step_rows"] != arguments.global_batch_size
        print(f", the last one of {show(epoch['last_step_rows'])}" if short else "")
    print()
    write_table(header, rows)
    return 0


def _layout(arguments: Namespace) -> SplitLayout:
    num_workers = 1 if arguments.num_workers is None else arguments.num_workers
    if arguments.num_splits is not None:
        return SplitLayout(arguments.num_splits, uneven=arguments.uneven)
    if arguments.world_sizes is None:
        raise InvalidArgumentError("name NUM_SPLITS, or --world-sizes for the smallest number that allows them")
    if arguments.uneven:
        raise InvalidArgumentError("--uneven needs NUM_SPLITS: any number of at least the world size will do")
    return SplitLayout.for_world_sizes(arguments.world_sizes, num_workers=num_workers)


def _world_sizes(layout: SplitLayout, arguments: Namespace) -> list[int]:
    num_workers = 1 if arguments.num_workers is None else arguments.num_workers
    if arguments.global_batch_size is not None:
        layout.check_global_batch_size(arguments.global_batch_size)
    if arguments.world_sizes is not None and arguments.num_splits is not None:
        for size in arguments.world_sizes:
            layout.check(size, num_workers)
        return sorted(set(arguments.world_sizes))
    sizes = layout.world_sizes(num_workers)
    if not sizes:
        if layout.uneven:
            layout.check(1, num_workers)
        raise LayoutError(
            f"num_workers={num_workers} reader workers cannot share num_splits={layout.num_splits}; "
            f"multiples of {num_workers} work"
        )
    return sizes


def _topology(layout: SplitLayout, world_size: int, arguments: Namespace) -> dict[str, Any]:
    if layout.uneven:
        return _uneven_topology(layout, world_size, arguments)
    group = layout.num_splits // world_size
    line: dict[str, Any] = {"world size": world_size, "splits per rank": group}
    if arguments.global_batch_size is not None:
        line["local batch"] = layout.local_batch_size(arguments.global_batch_size, world_size)
    workers = SplitLayout(group).world_sizes() if arguments.num_workers is None else [arguments.num_workers]
    return line | {"reader workers": workers}


def _uneven_topology(layout: SplitLayout, world_size: int, arguments: Namespace) -> dict[str, Any]:
    """Of the smallest group and the largest, which differ by one split at most."""
    smallest, largest = layout.num_splits // world_size, -(-layout.num_splits // world_size)
    groups = sorted({smallest, largest})
    line: dict[str, Any] = {"world size": world_size, "splits per rank": groups}
    if arguments.global_batch_size is not None:
        line["local batch"] = [arguments.global_batch_size // layout.num_splits * group for group in groups]
    if arguments.num_workers is None:
        return line | {"reader workers up to": smallest}
    return line | {"reader workers": [arguments.num_workers]}


def _epoch(layout: SplitLayout, arguments: Namespace) -> dict[str, int]:
    """What a table of so many rows gives: the same for every world size."""
    if arguments.rows is None:
        return {}
    rows = check_int("--rows", arguments.rows, minimum=0)
    if rows < layout.num_splits:
        raise NotEnoughRowsError(
            f"{rows} rows are fewer than num_splits={layout.num_splits}; use at most as many splits as rows"
        )
    per_split, dropped = divmod(rows, layout.num_splits)
    facts = {"rows_per_split": per_split, "dropped_rows": dropped}
    if arguments.global_batch_size is not None:
        size = arguments.global_batch_size
        steps = num_batches(rows - dropped, size, drop_last=False)
        facts |= {"steps": steps, "last_step_rows": rows - dropped - (steps - 1) * size}
    return facts


def _keys(line: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(" ", "_"): value for name, value in line.items()}
