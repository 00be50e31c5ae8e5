"""``ElasticTorchTrainer``: Ray Train's elastic training that only ever picks legal world sizes."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from typing import Any

from ray.train import DataConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lance_ray_stream.data_config import StreamDataConfig
from lance_ray_stream.errors import InvalidArgumentError, LayoutError
from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.ray_internals.train import elastic_policy, use_scaling_policy
from lance_ray_stream.transforms import check_operators, contains_stream, stream_of

logger = logging.getLogger(__name__)

# A num_splits beyond this is no advice: every step would need as many rows.
_MAX_ADVISED_SPLITS = 10_000


class ElasticTorchTrainer(TorchTrainer):
    """A ``ray.train.torch.TorchTrainer`` for ``ScalingConfig(num_workers=(min, max))`` over streams.

    Ray's own policy starts as many workers as the cluster has room for. This one rounds that number down to
    a world size that every stream of the trainer can be dealt out to, and logs what it leaves unused and why. All
    arguments are those of ``TorchTrainer``; a fixed ``num_workers`` is checked too.

    Raises:
        InvalidArgumentError: without a stream among ``datasets``, with one whose ``num_splits`` is None, without
            ``StreamDataConfig``, or if ``min`` is 0.
        LayoutError: if no legal world size lies in the range, with the nearest ones and the
            ``num_splits`` that would serve.
        UnsupportedOperatorError: if a stream's transforms cannot keep one row per row.
    """

    def __init__(
        self,
        train_loop_per_worker: Any,
        *,
        scaling_config: ScalingConfig,
        datasets: dict[str, Any],
        dataset_config: DataConfig,
        **kwargs: Any,
    ) -> None:
        sizes = legal_world_sizes(datasets, dataset_config, scaling_config)
        super().__init__(
            train_loop_per_worker,
            scaling_config=scaling_config,
            datasets=datasets,
            dataset_config=dataset_config,
            **kwargs,
        )
        if isinstance(scaling_config.num_workers, tuple):
            most, asked = sizes[-1], scaling_config.num_workers[1]
            if most < asked:
                logger.warning(
                    "At most %d workers are asked for, not %d: the streams cannot be dealt out to more.", most, asked
                )
            use_scaling_policy(self, lambda: elastic_policy(scaling_config, LegalWorldSizes(sizes), ask_for=most))


class LegalWorldSizes:
    """Rounds the number of workers that a cluster has room for down to a legal world size."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = sorted(sizes)
        self._latest: int | None = None

    def __call__(self, possible: int) -> int:
        """The largest legal size of at most ``possible``, 0 if there is none."""
        at = bisect.bisect_right(self.sizes, possible)
        chosen = self.sizes[at - 1] if at else 0
        if possible != self._latest:
            self._latest = possible
            if possible > chosen:
                # A warning, because nothing less than that leaves an actor, where this runs.
                logger.warning(
                    "The cluster has room for %d workers; %d of them stay unused, because the streams can only be "
                    "dealt out to %s workers here. Another num_splits makes other world sizes legal.",
                    possible,
                    possible - chosen,
                    _listed(self.sizes),
                )
        return chosen


def legal_world_sizes(datasets: dict[str, Any], dataset_config: DataConfig, scaling_config: ScalingConfig) -> list[int]:
    """The world sizes in the range of ``scaling_config`` that are legal for every stream, ascending.

    Raises:
        InvalidArgumentError: if there is no stream, or one whose ``num_splits`` follows the world size.
        LayoutError: if there is no such size.
        UnsupportedOperatorError: if a stream's transforms cannot keep one row per row.
    """
    if not isinstance(dataset_config, StreamDataConfig):
        raise InvalidArgumentError(
            "An elastic trainer needs dataset_config=StreamDataConfig(...), which deals the streams out to any number "
            f"of workers; got {type(dataset_config).__name__}."
        )
    num_splits = _num_splits(datasets)
    workers = dataset_config.num_workers
    asked: Any = scaling_config.num_workers  # its annotation leaves the pair out
    low, high = asked if isinstance(asked, tuple) else (max(asked, 1),) * 2  # 0 is Ray's local mode: a world of one
    if low < 1:
        raise InvalidArgumentError(
            f"ScalingConfig(num_workers={asked}) would start without workers; the least that works is 1."
        )
    layouts = [dataset_config.layout(name, splits) for name, splits in num_splits.items()]
    legal = set.intersection(*(set(layout.world_sizes(workers)) for layout in layouts))
    inside = sorted(size for size in legal if low <= size <= high)
    if not inside:
        raise LayoutError(_no_legal_size(num_splits, workers, legal, low, high))
    return inside


def _num_splits(datasets: dict[str, Any]) -> dict[str, int]:
    """The number of splits of each stream, by its name."""
    found: dict[str, int] = {}
    for name, dataset in datasets.items():
        if not contains_stream(dataset):
            continue
        check_operators(dataset, name)
        num_splits = stream_of(dataset).spec.num_splits
        if num_splits is None:
            raise InvalidArgumentError(
                f"Dataset {name!r} has num_splits=None, so its splits change with the world size. Name num_splits "
                "in read_stream(), for example SplitLayout.for_world_sizes([...]).num_splits."
            )
        found[name] = num_splits
    if not found:
        raise InvalidArgumentError(
            f"None of the datasets ({', '.join(datasets) or 'there are none'}) comes from read_stream(); without a "
            "stream every world size is legal: use ray.train.torch.TorchTrainer."
        )
    return found


def _no_legal_size(num_splits: dict[str, int], workers: int, legal: set[int], low: int, high: int) -> str:
    asked = f"num_workers=({low}, {high})" if low < high else f"num_workers={high}"
    below = max((size for size in legal if size < low), default=None)
    above = min((size for size in legal if size > high), default=None)
    near = " and ".join(str(size) for size in (below, above) if size is not None) or "none"
    streams = ", ".join(f"{name!r} has num_splits={splits}" for name, splits in num_splits.items())
    serving = f"{high} workers: multiples of {high * workers}"
    for_all = SplitLayout.for_world_sizes(range(low, high + 1), num_workers=workers).num_splits
    if low < high and for_all <= _MAX_ADVISED_SPLITS:
        serving += f"; every number from {low} to {high}: multiples of {for_all}"
    return (
        f"No world size in ScalingConfig({asked}) is legal: {streams}, with StreamDataConfig(num_workers={workers}). "
        f"Nearest legal world sizes: {near}. num_splits that would serve {serving}."
    )


def _listed(sizes: list[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))
