"""What the ``iter_*`` methods of a stream return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class StreamBatches:
    """The batches of what is left of an epoch; each ``iter()`` goes on from where the stream stands.

    ``len()`` is the number of batches that the next iteration delivers, the same on every rank.

    Args:
        count: that number, at present.
        start: begins an iteration.
    """

    def __init__(self, count: Callable[[], int], start: Callable[[], Iterator[Any]]) -> None:
        self._count = count
        self._start = start

    def __len__(self) -> int:
        return self._count()

    def __iter__(self) -> Iterator[Any]:
        return self._start()

    def __repr__(self) -> str:
        return f"StreamBatches({len(self)} batches left in the epoch)"
