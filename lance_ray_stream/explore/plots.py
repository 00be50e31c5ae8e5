"""Layouts and plans as pictures: who owns what, which rows a step has, what shuffling costs in reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.explore import style, tables
from lance_ray_stream.explore.locality import storage_positions
from lance_ray_stream.layout import IntArray, SplitLayout, check_int

# Panels of the same kind that are still legible beside each other.
_MAX_PANELS = 6
# Ranks that still get a name each.
_MAX_NUMBERED = 48
# Squares of a step that still hold a number.
_MAX_NUMBERED_ROWS = 192


def plot_ownership(layout: SplitLayout, world_sizes: Sequence[int], num_workers: int = 1) -> Figure:
    """Who owns which splits: one strip per world size, cut into ranks; thin lines part the reader workers.

    Raises:
        LayoutError: if a world size, or the number of reader workers, does not divide the splits.
    """
    owners = tables.ownership(layout, world_sizes, num_workers)
    figure = style.new_figure(
        1.2 + 0.45 * len(world_sizes), f"Each rank owns a contiguous group of the {layout.num_splits} splits"
    )
    axes = figure.subplots()
    for line in owners.itertuples():
        strip = list(world_sizes).index(line.world_size)
        axes.barh(
            strip, line.num_splits, left=line.first_split, height=0.8, color=_rank_colour(line.rank), edgecolor="white"
        )
    for strip, world_size in enumerate(world_sizes):
        _name_ranks(axes, layout, world_size, strip, len(world_sizes), num_workers)
    axes.set_xlim(0, layout.num_splits)
    axes.set_ylim(len(world_sizes) - 0.5, -0.5)
    axes.set_yticks(range(len(world_sizes)), [f"W = {size}" for size in world_sizes])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.spines[["top", "right", "left"]].set_visible(False)
    workers = "" if num_workers == 1 else f"; thin lines: {num_workers} reader workers in each rank"
    style.label(axes, x=f"split{workers}", y="world size")
    return figure


def _rank_colour(rank: int) -> str:
    return style.SKY if rank % 2 else style.BLUE


def _name_ranks(
    axes: Axes, layout: SplitLayout, world_size: int, strip: int, num_strips: int, num_workers: int
) -> None:
    """Broad lines between the ranks of a strip, and their names as far as there is room."""
    # the strip's height, as shares of the axis from below, which runs downwards
    low, high = 1 - (strip + 0.9) / num_strips, 1 - (strip + 0.1) / num_strips
    for rank in range(world_size):
        group = layout.splits_of(rank, world_size)
        if rank:
            axes.axvline(group[0], low, high, color="white", lw=3)
        if world_size > _MAX_NUMBERED:
            continue
        axes.text(
            (group[0] + group[-1] + 1) / 2,
            strip,
            f"rank {rank}" if world_size * num_workers <= 16 else str(rank),
            ha="center",
            va="center",
            fontsize=8 if world_size <= 24 else 6,
            color="black" if rank % 2 else "white",
            # hides the line of reader workers behind the name
            bbox={"facecolor": _rank_colour(rank), "edgecolor": "none", "pad": 1.5},
        )


def plot_raster(
    plan: EpochPlan, *, cycles: int | None = None, global_batch_size: int | None = None, world_size: int | None = None
) -> Figure:
    """The plan as a picture: splits by cycles, each row in the colour of its place in storage.

    Args:
        cycles: how many cycles to show, from the first; all if None.
        global_batch_size: draw a line between steps of this size.
        world_size: draw a line between the split groups of this many ranks.

    Raises:
        LayoutError: if a number does not fit the splits.
    """
    layout = SplitLayout(plan.num_splits)
    shown = plan.rows_per_split if cycles is None else min(check_int("cycles", cycles, minimum=1), plan.rows_per_split)
    figure = style.new_figure(
        min(6.0, 2.0 + 0.14 * plan.num_splits), f"Epoch {plan.epoch}: which row is at (split, cycle)?"
    )
    axes = figure.subplots()
    image = _draw_rows(axes, storage_positions(plan)[:, :shown], first_cycle=0, num_rows=_num_rows(plan))
    note = []
    if global_batch_size is not None:
        per_step = layout.check_global_batch_size(global_batch_size) // layout.num_splits
        for cycle in range(per_step, shown, per_step):
            axes.axvline(cycle - 0.5, color="white", lw=0.8)
        note.append(f"vertical lines: steps of {global_batch_size} rows")
    if world_size is not None:
        _draw_ranks(axes, layout, world_size)
        note.append(f"horizontal lines: {world_size} ranks")
    style.label(axes, title="; ".join(note), x="cycle (index in the split)", y="split")
    _explain_colours(figure.colorbar(image, ax=axes, pad=0.02))
    return figure


def plot_step(plan: EpochPlan, step: int, global_batch_size: int, world_sizes: Sequence[int] = (1, 4, 8)) -> Figure:
    """One step at several world sizes: the same rows each time, shared out among more ranks.

    Each square is a row, in the colour of its place in storage; the number in it says as which row of
    its rank it arrives in this step.

    Raises:
        LayoutError: if the batch size or a world size does not fit the splits.
        InvalidArgumentError: if the epoch has no such step, or there are too many panels.
    """
    layout = SplitLayout(plan.num_splits)
    _check_panels("world_sizes", world_sizes)
    num_rows = len(plan.row_ids_of_step(step, global_batch_size))
    cycles = num_rows // layout.num_splits
    first = step * (global_batch_size // layout.num_splits)
    positions = storage_positions(plan)[:, first : first + cycles]
    numbered = num_rows <= _MAX_NUMBERED_ROWS
    arrival = " (numbers: order of arrival on a rank)" if numbered else ""
    figure = style.new_figure(
        min(7.0, 1.6 + 0.2 * layout.num_splits), f"Step {step} of epoch {plan.epoch}: the same {num_rows} rows{arrival}"
    )
    panels = figure.subplots(1, len(world_sizes), squeeze=False)[0]
    for axes, world_size in zip(panels, world_sizes, strict=True):
        layout.check(world_size)
        image = _draw_rows(axes, positions, first_cycle=first, num_rows=_num_rows(plan))
        _draw_ranks(axes, layout, world_size)
        if numbered:
            _number_arrivals(axes, layout, world_size, positions, first, _num_rows(plan))
        one = f"W = {world_size}: {num_rows // world_size} rows per rank"
        style.label(axes, title=one, x="cycle", y="split" if axes is panels[0] else "")
    _explain_colours(figure.colorbar(image, ax=list(panels), pad=0.02))
    return figure


def plot_shuffle_spread(plans: Mapping[int, EpochPlan], global_batch_size: int, *, steps: int = 8) -> Figure:
    """Where the rows of the first steps lie in storage, for several clump sizes, and how many places that makes.

    Args:
        plans: clump size -> plan, as ``plans_by_clump_size()`` makes them.
        steps: how many steps the upper panels show.
    """
    sizes = sorted(plans)
    _check_panels("plans", sizes)
    spread = tables.shuffle_spread(plans, global_batch_size)
    figure = style.new_figure(5.2, f"Clumps make a step less mixed (steps of {global_batch_size} rows)")
    panels = figure.subplot_mosaic([[f"clump {size}" for size in sizes], ["places"] * len(sizes)])
    for size in sizes:
        axes, plan = panels[f"clump {size}"], plans[size]
        cycles = min(steps * (global_batch_size // plan.num_splits), plan.rows_per_split)
        positions = storage_positions(plan)[:, :cycles]
        step = np.broadcast_to(np.arange(cycles) // (global_batch_size // plan.num_splits), positions.shape)
        axes.scatter(step.ravel(), positions.ravel(), s=14, marker="_", color=style.BLUE, lw=0.9)
        axes.set_ylim(0, _num_rows(plan))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        first = size == sizes[0]
        style.label(axes, title=_clump_title(size), x="step", y="place in storage (row)" if first else "")
        if not first:
            axes.set_yticklabels([])
    axes = panels["places"]
    by_size = spread.groupby("clump_size")["places"].agg(["mean", "min", "max"])
    axes.axhline(global_batch_size, color=style.GREY, ls="--", lw=1, label="as many places as rows")
    bars = [by_size["mean"] - by_size["min"], by_size["max"] - by_size["mean"]]
    axes.errorbar(
        by_size.index, by_size["mean"], yerr=bars, color=style.BLUE, marker="o", capsize=4, label="mean, min and max"
    )
    style.doubling_axis(axes, sizes)
    axes.set_ylim(0, global_batch_size * 1.12)
    style.plain(axes)
    style.label(axes, x="shuffle_clump_size (rows)", y="separate places per step")
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def plot_locality(plans: Mapping[int, EpochPlan], *, row_bytes: int, **options: Any) -> Figure:
    """What clumps save in reads: rows per contiguous read, and bytes touched for each byte asked for.

    Args:
        plans: clump size -> plan, as ``plans_by_clump_size()`` makes them.
        row_bytes: size of a row.
        options: the other arguments of ``locality()``.
    """
    reads = tables.locality(plans, row_bytes=row_bytes, **options).sort_values("clump_size")
    block_bytes = options.get("block_bytes", tables.BLOCK_BYTES)
    figure = style.new_figure(3.4, f"Clumps make reads longer (rows of {row_bytes:,} bytes)")
    left, right = figure.subplots(1, 2)
    left.plot(reads["clump_size"], reads["rows_per_range"], color=style.BLUE, marker="o")
    style.label(left, title="Length of a contiguous read", x="shuffle_clump_size (rows)", y="rows, mean of all windows")
    right.plot(reads["clump_size"], reads["amplification"], color=style.VERMILLION, marker="s")
    right.axhline(1, color=style.GREY, ls="--", lw=1)
    right.annotate(
        "nothing is read in vain",
        (0, 1),
        xycoords=("axes fraction", "data"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=style.GREY,
    )
    style.label(
        right,
        title=f"Bytes touched in blocks of {block_bytes:,} bytes",
        x="shuffle_clump_size (rows)",
        y="bytes touched / bytes asked",
    )
    for axes, column in ((left, "rows_per_range"), (right, "amplification")):
        style.plain(axes)
        style.doubling_axis(axes, plans)
        axes.set_ylim(0, reads[column].max() * 1.15)
        for size, value in zip(reads["clump_size"], reads[column], strict=True):
            axes.annotate(
                f"{value:.1f}",
                (size, value),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
    return figure


def _num_rows(plan: EpochPlan) -> int:
    """Rows of the plan, without the dropped ones."""
    return plan.num_splits * plan.rows_per_split


def _clump_title(size: int) -> str:
    return "single rows" if size == 1 else f"clumps of {size}"


def _check_panels(name: str, panels: Sequence[int]) -> None:
    if not 1 <= len(panels) <= _MAX_PANELS:
        raise InvalidArgumentError(f"{name} has {len(panels)} entries; a figure shows 1 to {_MAX_PANELS} side by side.")


def _draw_rows(axes: Axes, positions: IntArray, *, first_cycle: int, num_rows: int) -> Any:
    """(splits, cycles) places in storage as coloured squares, split 0 on top."""
    num_splits, cycles = positions.shape
    image = axes.imshow(
        positions,
        aspect="auto",
        interpolation="nearest",
        cmap=style.COLORMAP,
        vmin=0,
        vmax=num_rows - 1,
        extent=(first_cycle - 0.5, first_cycle + cycles - 0.5, num_splits - 0.5, -0.5),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def _draw_ranks(axes: Axes, layout: SplitLayout, world_size: int) -> None:
    """Lines between split groups, and the ranks' numbers on the right."""
    groups = [layout.splits_of(rank, world_size) for rank in range(world_size)]
    for group in groups[1:]:
        axes.axhline(group[0] - 0.5, color="white", lw=2.5)
    if world_size > _MAX_NUMBERED:
        return
    right = axes.secondary_yaxis("right")
    names = [f"r{rank}" for rank in range(world_size)]
    right.set_yticks([(group[0] + group[-1]) / 2 for group in groups], names, fontsize=8)
    right.tick_params(length=0)


def _number_arrivals(
    axes: Axes, layout: SplitLayout, world_size: int, positions: IntArray, first: int, num_rows: int
) -> None:
    group = layout.num_splits // world_size
    for (split, cycle), place in np.ndenumerate(positions):
        axes.text(
            first + cycle,
            split,
            str(cycle * group + split % group),
            ha="center",
            va="center",
            fontsize=6.5,
            color="black" if place > 0.6 * num_rows else "white",
        )


def _explain_colours(bar: Colorbar) -> None:
    bar.set_label("place in storage (row)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
