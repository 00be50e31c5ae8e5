"""How plots look: colours that colour-blind readers can tell apart, sizes for the width of a notebook."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

COLORMAP = "viridis"  # storage position: ordered, also in grey
# The palette of Okabe and Ito.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
VERMILLION, SKY, PURPLE = "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#777777"

WIDTH_INCHES = 9.0
_DPI = 110


def new_figure(height_inches: float, title: str) -> Figure:
    """An empty figure as wide as a notebook."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=_DPI, layout="constrained")
    figure.suptitle(title, fontsize=12)
    return figure


def label(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Title and axis labels in one size for all plots."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)


def plain(axes: Axes) -> None:
    """A light grid, and no frame where nothing is read off."""
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def doubling_axis(axes: Axes, sizes: Iterable[int]) -> None:
    """A logarithmic x axis with a tick at each of ``sizes`` and nowhere else."""
    ticks = sorted(sizes)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(size) for size in ticks])
