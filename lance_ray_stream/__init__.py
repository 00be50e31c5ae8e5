"""LanceDB tables for PyTorch training on Ray: one order for every number of GPUs, resumable anywhere."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lance_ray_stream.collate import TensorCollate
    from lance_ray_stream.data_config import StreamDataConfig
    from lance_ray_stream.elastic import ElasticTorchTrainer
    from lance_ray_stream.epoch_plan import EpochPlan
    from lance_ray_stream.iterator import StreamIterator
    from lance_ray_stream.layout import SplitLayout
    from lance_ray_stream.protection import protect_version
    from lance_ray_stream.read import plan_epoch, read_stream
    from lance_ray_stream.state import merge_state_dicts
    from lance_ray_stream.table import TableRef
    from lance_ray_stream.tags import ProtectedVersion, protected_versions, unprotect_version
    from lance_ray_stream.train import get_stream

__all__ = [
    "ElasticTorchTrainer",
    "EpochPlan",
    "ProtectedVersion",
    "SplitLayout",
    "StreamDataConfig",
    "StreamIterator",
    "TableRef",
    "TensorCollate",
    "get_stream",
    "merge_state_dicts",
    "plan_epoch",
    "protect_version",
    "protected_versions",
    "read_stream",
    "unprotect_version",
]
__version__ = "0.1.0"

# Looked up on first use: a reader process imports this package for its reader alone, and would otherwise wait
# seconds for torch and Ray Train, which it never uses.
_MODULES = {
    "ElasticTorchTrainer": "elastic",
    "EpochPlan": "epoch_plan",
    "ProtectedVersion": "tags",
    "SplitLayout": "layout",
    "StreamDataConfig": "data_config",
    "StreamIterator": "iterator",
    "TableRef": "table",
    "TensorCollate": "collate",
    "get_stream": "train",
    "merge_state_dicts": "state",
    "plan_epoch": "read",
    "protect_version": "protection",
    "protected_versions": "tags",
    "read_stream": "read",
    "unprotect_version": "tags",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
