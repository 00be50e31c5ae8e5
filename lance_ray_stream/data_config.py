"""Who gets what in Ray Train: a ``DataConfig`` that makes one :class:`StreamIterator` per rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from ray.actor import ActorHandle
from ray.data import DataContext, DataIterator, Dataset, ExecutionOptions
from ray.train import DataConfig

from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.feed import Feed
from lance_ray_stream.iterator import StreamIterator
from lance_ray_stream.layout import SplitLayout, check_int
from lance_ray_stream.planner import Planner, PlannerActor, PlannerOfRun, PublishedPlan
from lance_ray_stream.spec import not_enough_rows
from lance_ray_stream.transforms import check_operators, contains_stream, stream_of


class StreamDataConfig(DataConfig):
    """Gives every rank of a ``TorchTrainer`` its contiguous group of splits.

    Datasets of ``read_stream`` become :class:`StreamIterator`; all others keep Ray's own behaviour.

    Args:
        num_workers: reader workers per rank: the threads of one read task, each with a
            contiguous part of the rank's splits. The batches do not depend on it.
        global_batch_size: rows of a step over all ranks, for iterations that name no size; a multiple of
            ``num_splits``. One for all streams, or a dictionary by their names.
        uneven: allow every world size up to ``num_splits``, also where ranks then have unequally many splits; they read
            by ``global_batch_size`` only, and weigh their losses by ``stream.gradient_weight``.
        prepare_next_epoch: read the first rows of the next epoch while the last ones of the present epoch are trained
            on, so that there is no gap between them. Takes up to 128 MiB of the object store per rank, and lets go of
            them 30 seconds after an epoch that no other follows. Only in Ray Train's workers, and not where a
            transform runs on actors.
        progress: rank 0 prints a line to stderr every ten seconds, and when an iteration ends that took longer: epoch,
            step, rows per second, share of the time that it waited for data.
        ray_data_progress: show Ray Data's own progress bars and log lines too, for every rank and epoch.
        datasets_to_split: as in ``ray.train.DataConfig``, for the datasets that are not streams.
        execution_options: as in ``ray.train.DataConfig``; ``preserve_order`` is always on for streams.
        enable_shard_locality: as in ``ray.train.DataConfig``, for the datasets that are not streams.

    Raises:
        InvalidArgumentError: if an argument is not of its type, or not positive.
    """

    def __init__(
        self,
        *,
        num_workers: int = 1,
        global_batch_size: int | Mapping[str, int] | None = None,
        uneven: bool = False,
        prepare_next_epoch: bool = True,
        progress: bool = True,
        ray_data_progress: bool = False,
        datasets_to_split: Literal["all"] | list[str] = "all",
        execution_options: ExecutionOptions | dict[str, ExecutionOptions] | None = None,
        enable_shard_locality: bool = True,
    ) -> None:
        super().__init__(
            datasets_to_split=datasets_to_split,
            execution_options=execution_options,
            enable_shard_locality=enable_shard_locality,
        )
        self._execution_options = execution_options
        self.prepare_next_epoch = _check_bool("prepare_next_epoch", prepare_next_epoch)
        self.progress = _check_bool("progress", progress)
        self.ray_data_progress = _check_bool("ray_data_progress", ray_data_progress)
        self.num_workers = check_int("num_workers", num_workers, minimum=1)
        self.global_batch_size = _check_sizes(global_batch_size)
        self.uneven = _check_bool("uneven", uneven)
        self._planner = PlannerOfRun()

    def __repr__(self) -> str:
        size = "" if self.global_batch_size is None else f", global_batch_size={self.global_batch_size}"
        return f"StreamDataConfig(num_workers={self.num_workers}{size}{', uneven=True' if self.uneven else ''})"

    def layout(self, name: str, num_splits: int) -> SplitLayout:
        """How the splits of a stream are dealt out.

        Raises:
            LayoutError: if the stream's ``global_batch_size`` is no multiple of ``num_splits``.
        """
        layout = SplitLayout(num_splits, uneven=self.uneven)
        size = self.batch_size_of(name)
        if size is not None:
            layout.check_global_batch_size(size)
        return layout

    def batch_size_of(self, name: str) -> int | None:
        """The ``global_batch_size`` of a stream, if it has one."""
        sizes = self.global_batch_size
        return sizes.get(name) if isinstance(sizes, Mapping) else sizes

    def configure(
        self,
        datasets: dict[str, Dataset],
        world_size: int,
        worker_handles: list[ActorHandle[Any]] | None = None,
        worker_node_ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[dict[str, DataIterator]]:
        """One dictionary of iterators per rank. Has no side effects on itself or the datasets.

        Raises:
            InvalidArgumentError: if ``global_batch_size`` names what is no stream.
            LayoutError: if ``world_size`` or ``global_batch_size`` is illegal for a stream, naming those that work.
            NotEnoughRowsError: if ``num_splits=None`` became more splits than there are rows.
            UnsupportedOperatorError: if a stream's transforms cannot keep one row per row.
        """
        check_int("world_size", world_size, minimum=1)
        streams = {name: dataset for name, dataset in datasets.items() if contains_stream(dataset)}
        others = {name: dataset for name, dataset in datasets.items() if name not in streams}
        self._check_names(streams)
        # Streams first: what is illegal is refused before anything is started or made per rank.
        layouts = {name: self._checked_layout(name, dataset, world_size) for name, dataset in streams.items()}
        output: list[dict[str, DataIterator]] = [{} for _ in range(world_size)]
        if others:
            output = super().configure(others, world_size, worker_handles, worker_node_ids, **kwargs)
        if streams:
            planner = self._planner.actor or PlannerActor.start()
        for name, dataset in streams.items():
            of_ranks = self._iterators(name, dataset, layouts[name], world_size, planner.of_stream(name))
            for shards, iterator in zip(output, of_ranks, strict=True):
                shards[name] = iterator
        return output

    def iterators(
        self, name: str, dataset: Dataset, world_size: int, *, planner: Planner[PublishedPlan]
    ) -> list[StreamIterator]:
        """The iterators of all ranks for one stream; they share ``planner``."""
        return self._iterators(name, dataset, self._checked_layout(name, dataset, world_size), world_size, planner)

    def _checked_layout(self, name: str, dataset: Dataset, world_size: int) -> SplitLayout:
        """How a stream is dealt out to so many ranks, if it can be."""
        check_operators(dataset, name)
        source = stream_of(dataset)
        num_splits = source.spec.num_splits
        if num_splits is None:
            num_splits = world_size
            warnings.warn(
                f"Dataset {name!r} has num_splits=None, so it takes num_splits={world_size} from the number of "
                "ranks: its batches change with that number and its state fits no other. Name num_splits, for example "
                f"SplitLayout.for_world_sizes([...]).num_splits, to make the run elastic.",
                stacklevel=3,
            )
        layout = self.layout(name, num_splits)
        layout.check(world_size, self.num_workers)
        if source.spec.total_rows < num_splits:  # only possible if num_splits came from the world size
            raise not_enough_rows(repr(source.spec.table), source.spec.total_rows, num_splits, None)
        return layout

    def _iterators(
        self, name: str, dataset: Dataset, layout: SplitLayout, world_size: int, planner: Planner[PublishedPlan]
    ) -> list[StreamIterator]:
        feed = Feed(
            name=name,
            dataset=dataset,
            num_workers=self.num_workers,
            options=self._options(name),
            prepare_next_epoch=self.prepare_next_epoch,
            quiet=not self.ray_data_progress,
        )
        return [
            StreamIterator(
                feed,
                progress=self.progress,
                name=name,
                layout=layout,
                global_batch_size=self.batch_size_of(name),
                rank=rank,
                world_size=world_size,
                planner=planner,
            )
            for rank in range(world_size)
        ]

    def _check_names(self, streams: Mapping[str, Dataset]) -> None:
        sizes = self.global_batch_size if isinstance(self.global_batch_size, Mapping) else {}
        unknown = [name for name in sizes if name not in streams]
        if unknown:
            raise InvalidArgumentError(
                f"StreamDataConfig(global_batch_size=...) names {', '.join(map(repr, unknown))}; the streams of the "
                f"trainer are {', '.join(map(repr, streams)) or 'none'}."
            )

    def _options(self, name: str) -> ExecutionOptions:
        """The user's options for a dataset; those of the present context if there are none."""
        options = self._execution_options
        if isinstance(options, dict):
            options = options.get(name)
        return options or DataContext.get_current().execution_options


def _check_sizes(value: int | Mapping[str, int] | None) -> int | dict[str, int] | None:
    if isinstance(value, Mapping):
        return {name: check_int(f"global_batch_size[{name!r}]", size, minimum=1) for name, size in value.items()}
    return None if value is None else check_int("global_batch_size", value, minimum=1)


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, got {value!r}.")
    return value
