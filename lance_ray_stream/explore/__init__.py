"""Tables (pandas) and plots (matplotlib) of layouts, plans, states and runs, for notebooks and reviews.

Needs the extra ``explore``: ``pip install 'lance-ray-stream[explore]'``. Tables are ``pandas.DataFrame``; plots are
``matplotlib.figure.Figure``, made without pyplot and so without global state: a notebook shows the
one that a cell ends with (after ``%matplotlib inline``), a script saves it with ``figure.savefig(path)``.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
    import pandas as _pandas  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"lance_ray_stream.explore needs pandas and matplotlib ({error}). "
        "Install them with: pip install 'lance-ray-stream[explore]'"
    ) from error

from lance_ray_stream.explore.locality import storage_positions
from lance_ray_stream.explore.plots import (
    plot_locality,
    plot_ownership,
    plot_raster,
    plot_shuffle_spread,
    plot_step,
)
from lance_ray_stream.explore.tables import (
    compare_states,
    costs,
    locality,
    ownership,
    plan,
    plans_by_clump_size,
    rows_of_step,
    shuffle_spread,
    topologies,
    window_reads,
)
from lance_ray_stream.explore.timeline import RunEvent, attempts, plot_timeline

__all__ = [
    "RunEvent",
    "attempts",
    "compare_states",
    "costs",
    "locality",
    "ownership",
    "plan",
    "plans_by_clump_size",
    "plot_locality",
    "plot_ownership",
    "plot_raster",
    "plot_shuffle_spread",
    "plot_step",
    "plot_timeline",
    "rows_of_step",
    "shuffle_spread",
    "storage_positions",
    "topologies",
    "window_reads",
]
