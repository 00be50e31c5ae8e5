"""``read_stream`` and ``plan_epoch``: from a table to a Ray dataset, and from the dataset to its plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import ray
from lancedb.table import Table
from ray.data import Dataset

from lance_ray_stream.datasource import StreamDatasource
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.layout import check_int
from lance_ray_stream.plan import build_plan, check_epoch
from lance_ray_stream.spec import make_spec
from lance_ray_stream.table import TableRef
from lance_ray_stream.transforms import stream_of


def read_stream(
    table: Table | TableRef,
    *,
    num_splits: int | None = None,
    shuffle: bool = True,
    shuffle_seed: int | None = 0,
    epoch: int = 0,
    shuffle_clump_size: int | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    shuffle_algorithm: str = "lancedb",
    num_cpus: float | None = None,
    concurrency: int | None = None,
) -> Dataset:
    """A LanceDB table as a stream of ``num_splits`` fixed, shuffled splits.

    Lazy: arguments are checked against the table, its version is pinned, and no row is read. Give
    the dataset to a ``TorchTrainer`` with ``dataset_config=StreamDataConfig()``, after any row-wise transforms. Used as
    a plain dataset it has one read task per split, in split order, rows in plan order.

    Args:
        table: an opened LanceDB table (its version is pinned), or a :class:`TableRef`.
        num_splits: number of splits, the same for the life of a run. Every world size that divides it can run.
            None: the world size, as in ``StreamingDataset``, with a warning that this is not elastic.
        shuffle: shuffle the whole table; if False, splits are runs of the table in storage order.
        shuffle_seed: of the shuffle, together with the epoch. None: drawn once at random and kept in the state.
        epoch: the epoch that is read first.
        shuffle_clump_size: shuffle runs of this many rows, which read faster, in place of single rows.
        columns: what is read, in this order; all if None. ``"_rowid"`` is Lance's row id.
        filter: SQL condition; only rows that pass it are in the stream.
        shuffle_algorithm: ``"lancedb"``: row for row the order of ``lancedb.streaming.StreamingDataset``.
            ``"indexed"``: computed in constant memory and planned without a scan, for very large tables.
        num_cpus: CPUs of each read task, as in Ray's ``read_*`` functions.
        concurrency: read tasks that run at the same time, over all ranks, as in Ray's ``read_*`` functions.

    Raises:
        InvalidArgumentError: if an argument is impossible, or the table cannot be read elsewhere.
        NotEnoughRowsError: if there are fewer rows than splits.
        TableNotFoundError, VersionNotFoundError: if the table or its version cannot be opened.
        UnsupportedColumnError: if a column cannot be read.
    """
    epoch = check_int("epoch", epoch, minimum=0)
    _check_resources(num_cpus, concurrency)
    spec = make_spec(
        table,
        num_splits=num_splits,
        shuffle=shuffle,
        shuffle_seed=shuffle_seed,
        shuffle_clump_size=shuffle_clump_size,
        columns=columns,
        filter=filter,
        shuffle_algorithm=shuffle_algorithm,
    )
    return _dataset_of(StreamDatasource(spec, epoch=check_epoch(spec, epoch)), num_cpus, concurrency)


def _dataset_of(source: StreamDatasource, num_cpus: float | None, concurrency: int | None) -> Dataset:
    dataset: Dataset = ray.data.read_datasource(
        source, override_num_blocks=source.num_splits, num_cpus=num_cpus, concurrency=concurrency
    )
    options = copy.deepcopy(dataset.context.execution_options)
    options.preserve_order = True
    dataset.context.execution_options = options
    return dataset


def _check_resources(num_cpus: float | None, concurrency: int | None) -> None:
    if concurrency is not None:
        check_int("concurrency", concurrency, minimum=1)
    if num_cpus is not None and not (type(num_cpus) in (int, float) and 0 <= num_cpus < math.inf):
        raise InvalidArgumentError(f"num_cpus must be a number of CPUs of at least 0 or None, got {num_cpus!r}.")


def plan_epoch(dataset: Dataset, epoch: int | None = None) -> EpochPlan:
    """Which rows an epoch of a stream has, and where; reads no payload.

    Args:
        dataset: from :func:`read_stream`, also with transforms.
        epoch: the epoch; that of ``read_stream`` if None.

    Raises:
        InvalidArgumentError: if the dataset is not a stream or the epoch is impossible.
        NotEnoughRowsError: if fewer rows pass the filter than there are splits.
        PlanError: if the plan cannot be built.
    """
    source = stream_of(dataset)
    epoch = source.epoch if epoch is None else check_int("epoch", epoch, minimum=0)
    return build_plan(replace(source.spec, num_splits=source.num_splits), epoch)
