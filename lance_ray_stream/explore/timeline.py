"""An elastic run as it went: its world sizes, steps, kills and resumes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.explore import style

EventKind = Literal["start", "step", "checkpoint", "kill", "resume", "end"]
_BEGINNINGS = ("start", "resume")


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened in a run.

    Attributes:
        time_s: when, in seconds from any common zero.
        kind: "start": the run began; "step": all ranks finished a step; "checkpoint": the state after that
            many steps was saved; "kill": a worker was lost; "resume": the run went on, from that
            many steps, with that many ranks; "end": it was done.
        step: steps that are done, counted over all epochs. At a kill, those done until then.
        world_size: the number of ranks at that moment; at a kill the number before it.
    """

    time_s: float
    kind: EventKind
    step: int
    world_size: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(EventKind):
            raise InvalidArgumentError(f"kind must be one of {', '.join(get_args(EventKind))}, got {self.kind!r}.")


def attempts(events: Iterable[RunEvent]) -> pd.DataFrame:
    """One line for each time that the run began or went on.

    Columns: world_size, start_s, end_s, first_step and last_step (steps done when it began and ended), steps (done in
    it), redone_steps (of them, those that an earlier attempt had done), ended_by ("kill", "end", "resume" for
    a change of size without a kill, or "" while it runs).

    Raises:
        InvalidArgumentError: if there are no events, or the first one is not a beginning.
    """
    records: list[dict[str, Any]] = []
    done = 0
    for part in _split(events):
        first, last = part[0], part[-1]
        last_step = max(event.step for event in part)
        records.append(
            {
                "world_size": first.world_size,
                "start_s": first.time_s,
                "end_s": last.time_s,
                "first_step": first.step,
                "last_step": last_step,
                "steps": last_step - first.step,
                "redone_steps": max(0, min(done, last_step) - first.step),
                "ended_by": last.kind if last.kind in ("kill", "end") else "",
            }
        )
        done = max(done, last_step)
    for record in records[:-1]:
        record["ended_by"] = record["ended_by"] or "resume"
    return pd.DataFrame.from_records(records)


def plot_timeline(events: Iterable[RunEvent], *, steps_per_epoch: int | None = None) -> Figure:
    """World size and progress over time, with kills, resumes and the steps that were done twice.

    Args:
        steps_per_epoch: draw a line where each epoch ends.

    Raises:
        InvalidArgumentError: if there are no events, or the first one is not a beginning.
    """
    events = list(events)
    parts = _split(events)
    table = attempts(events)
    zero = parts[0][0].time_s
    figure = style.new_figure(5.0, f"An elastic run: {len(parts)} attempts, {int(table['last_step'].max())} steps")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    for part, line in zip(parts, table.itertuples(), strict=True):
        start, end = line.start_s - zero, line.end_s - zero
        above.fill_between([start, end], line.world_size, step="post", color=style.SKY, alpha=0.6, lw=0)
        above.hlines(line.world_size, start, end, color=style.BLUE, lw=2)
        above.text((start + end) / 2, line.world_size, f"{line.world_size}", ha="center", va="bottom", fontsize=9)
        _draw_steps(below, part, zero, redone_until=line.first_step + line.redone_steps)
    _draw_marks(below, [event for part in parts for event in part], zero)
    above.set_ylim(0, table["world_size"].max() * 1.3)
    above.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    style.plain(above)
    style.plain(below)
    style.label(above, y="world size (ranks)")
    style.label(below, x="time (s)", y="steps done")
    if steps_per_epoch:
        for step in range(steps_per_epoch, int(table["last_step"].max()) + 1, steps_per_epoch):
            below.axhline(step, color=style.GREY, lw=0.8, ls=":", label="end of an epoch")
    _legend_once(below)
    return figure


def _split(events: Iterable[RunEvent]) -> list[list[RunEvent]]:
    """The events in order of time, cut at each beginning."""
    parts: list[list[RunEvent]] = []
    for event in sorted(events, key=lambda event: event.time_s):
        if event.kind in _BEGINNINGS:
            parts.append([])
        elif not parts:
            raise InvalidArgumentError(f"The first event of a run must be a start or a resume, got {event}.")
        parts[-1].append(event)
    if not parts:
        raise InvalidArgumentError("There are no events: a run has at least its start.")
    return parts


def _draw_steps(axes: Axes, part: list[RunEvent], zero: float, *, redone_until: int) -> None:
    """Progress as stairs; the part that an earlier attempt had done already in another colour."""
    progress = [event for event in part if event.kind in ("step", *_BEGINNINGS)]
    again = [event for event in progress if event.step <= redone_until]
    for chosen, colour, name in ((progress, style.BLUE, "steps"), (again, style.ORANGE, "steps done again")):
        if len(chosen) > 1:
            times = [event.time_s - zero for event in chosen]
            axes.plot(times, [event.step for event in chosen], color=colour, lw=2, drawstyle="steps-post", label=name)


def _draw_marks(axes: Axes, events: list[RunEvent], zero: float) -> None:
    looks: dict[str, dict[str, Any]] = {
        "checkpoint": {"marker": "o", "color": style.GREEN, "s": 18, "label": "checkpoint"},
        "kill": {"marker": "X", "color": style.VERMILLION, "s": 90, "label": "worker killed"},
        "resume": {"marker": ">", "color": style.PURPLE, "s": 70, "label": "resumed"},
    }
    for kind, look in looks.items():
        chosen = [event for event in events if event.kind == kind]
        if chosen:
            times = [event.time_s - zero for event in chosen]
            axes.scatter(times, [event.step for event in chosen], zorder=3, **look)


def _legend_once(axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, framealpha=0.9, edgecolor="none", loc="upper left")
