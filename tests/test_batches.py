"""One iteration at a time, from one thread at a time: without Ray."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from lance_ray_stream.batches import Iteration, StreamBatches
from lance_ray_stream.errors import StreamUsageError


def test_another_thread_is_told_so() -> None:
    """In words, and the batch goes to the thread that waited for it."""
    waiting, go_on = threading.Event(), threading.Event()

    def slow() -> Generator[int, None, None]:
        waiting.set()
        assert go_on.wait(timeout=30)
        yield 7

    iteration, received = Iteration(slow(), "train"), []
    thread = threading.Thread(target=lambda: received.append(next(iteration)))
    thread.start()
    assert waiting.wait(timeout=30)
    for refused in (iteration.__next__, iteration.close, iteration.end_for_another):
        with pytest.raises(StreamUsageError, match="Another thread is waiting for a batch of 'train'"):
            refused()
    go_on.set()
    thread.join(timeout=30)
    assert received == [7]
    assert iteration.is_live


def test_the_length_is_asked_for_anew() -> None:
    left = [3]
    batches = StreamBatches(lambda: left[0], lambda: iter("ab"))
    assert len(batches) == 3
    left[0] = 2
    assert len(batches) == 2
    assert [*iter(batches)] == ["a", "b"]
