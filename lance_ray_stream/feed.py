"""What is left of an epoch for one rank, as a dataset: its windows under the user's transforms."""

from __future__ import annotations

from dataclasses import dataclass

from ray.data import Dataset, ExecutionOptions

from lance_ray_stream.cursor import Cursor
from lance_ray_stream.datasource import WindowDatasource, max_window_rows
from lance_ray_stream.planner import PublishedPlan
from lance_ray_stream.position import windows
from lance_ray_stream.ray_internals import silence
from lance_ray_stream.resources import fit_into
from lance_ray_stream.spec import StreamSpec
from lance_ray_stream.transforms import rebase

# The first window of a reading is small, so that the first batch comes early.
FIRST_WINDOW_ROWS = 1_024


@dataclass(frozen=True, kw_only=True)
class Feed:
    """How one rank reads.

    Attributes:
        name: of the dataset in the trainer.
        dataset: the user's dataset, with the transforms over the stream.
        num_workers: reader workers of the rank.
        options: Ray Data's options for each execution.
        prepare_next_epoch: whether the next epoch is begun before the present one has ended.
        quiet: without Ray Data's own progress bars and log lines.
    """

    name: str
    dataset: Dataset
    num_workers: int
    options: ExecutionOptions
    prepare_next_epoch: bool = True
    quiet: bool = True

    def rest_of_epoch(self, spec: StreamSpec, plan: PublishedPlan, cursor: Cursor, *, waited: bool = False) -> Dataset:
        """The rows that ``cursor`` has not received yet, in the order of delivery, to be run by this rank.

        ``waited``: for CPUs, in vain; see :func:`fit_into`.
        """
        position = cursor.position()[cursor.splits.start : cursor.splits.stop]
        max_rows = max_window_rows(spec.row_bytes)
        cuts = windows(
            position,
            num_rows=cursor.rows_left(plan.rows_per_split),
            first_rows=min(FIRST_WINDOW_ROWS, max_rows),
            max_rows=max_rows,
        )
        source = WindowDatasource(
            spec,
            epoch=cursor.epoch,
            rows=plan.rows_to_fetch(),
            position=position,
            windows=list(cuts),
            num_workers=self.num_workers,
        )
        rest = rebase(self.dataset, source, world_size=cursor.world_size, options=self.options, quiet=self.quiet)
        rest = fit_into(rest, self.name, world_size=cursor.world_size, waited=waited)
        if self.quiet:
            silence(rest)
        return rest
