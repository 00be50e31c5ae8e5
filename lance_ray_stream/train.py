"""The stream inside a Ray Train worker."""

from __future__ import annotations

import weakref

import ray.train
from ray.data import Dataset

from lance_ray_stream.data_config import StreamDataConfig
from lance_ray_stream.errors import StreamUsageError
from lance_ray_stream.iterator import StreamIterator
from lance_ray_stream.planner import LocalPlanner
from lance_ray_stream.transforms import find_stream

# In local mode Ray Train hands out the dataset itself; its iterator has to be the same one at each call.
_local_streams: weakref.WeakKeyDictionary[Dataset, StreamIterator] = weakref.WeakKeyDictionary()


def get_stream(name: str = "train") -> StreamIterator:
    """This rank's stream: ``ray.train.get_dataset_shard(name)``, typed, and also in Ray Train's local mode.

    Raises:
        StreamUsageError: outside a Ray Train training function, or if the trainer's dataset ``name`` is
            missing, not a stream, or was dealt out without :class:`StreamDataConfig`.
    """
    try:
        shard = ray.train.get_dataset_shard(name)
    except RuntimeError as error:
        raise StreamUsageError(
            "get_stream() works inside the training function of a Ray Train trainer, where rank and world size are "
            "known. Elsewhere name them: StreamDataConfig().configure({'train': ds}, world_size=W)[rank]['train'], or "
            f"iterate over the dataset itself. ({error})"
        ) from None
    except (KeyError, AssertionError):
        raise StreamUsageError(
            f"The trainer has no dataset {name!r}. Pass TorchTrainer(datasets={{{name!r}: ds}}, "
            "dataset_config=StreamDataConfig())."
        ) from None
    if isinstance(shard, StreamIterator):
        return shard
    if isinstance(shard, Dataset) and find_stream(shard) is not None:
        return _local_stream(name, shard)
    raise StreamUsageError(
        f"Dataset {name!r} reached this rank as {type(shard).__name__}, without the order of a stream. Make it with "
        "read_stream() and pass TorchTrainer(dataset_config=StreamDataConfig())."
    )


def _local_stream(name: str, dataset: Dataset) -> StreamIterator:
    if dataset not in _local_streams:
        iterators = StreamDataConfig().iterators(name, dataset, 1, planner=LocalPlanner())
        _local_streams[dataset] = iterators[0]
    return _local_streams[dataset]
