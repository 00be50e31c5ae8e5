"""LanceDB tables for PyTorch training on Ray: one order for every number of GPUs, resumable anywhere."""

from lance_ray_stream.collate import TensorCollate
from lance_ray_stream.data_config import StreamDataConfig
from lance_ray_stream.iterator import StreamIterator
from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.plan import EpochPlan
from lance_ray_stream.read import plan_epoch, read_stream
from lance_ray_stream.state import merge_state_dicts
from lance_ray_stream.table import TableRef
from lance_ray_stream.train import get_stream

__all__ = [
    "EpochPlan",
    "SplitLayout",
    "StreamDataConfig",
    "StreamIterator",
    "TableRef",
    "TensorCollate",
    "get_stream",
    "merge_state_dicts",
    "plan_epoch",
    "read_stream",
]
__version__ = "0.1.0"
