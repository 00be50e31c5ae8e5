"""Memory that is free goes back to the system: allocators keep it, in a reader several windows of it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pyarrow as pa


def release_memory() -> None:
    """Give back what nobody uses of Arrow's pool and of the C library's heap, where LanceDB allocates.

    Takes milliseconds.
    """
    pa.default_memory_pool().release_unused()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """``malloc_trim`` of glibc; None where the C library has none, as on macOS."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
