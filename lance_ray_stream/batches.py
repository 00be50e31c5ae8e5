"""What the ``iter_*`` methods of a stream return."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from ray.exceptions import OwnerDiedError

from lance_ray_stream.errors import StreamUsageError
from lance_ray_stream.ray_internals.cluster import CpusHeldError

_logger = logging.getLogger("lance_ray_stream")


def read_on(
    read: Callable[[], Iterable[Any]], *, replan: Callable[[], bool], wait_no_longer: Callable[[], None], name: str
) -> Iterator[Any]:
    """The batches of ``read()``, and again when it ended for a reason that can be helped.

    Those are that the plan's row ids were lost with their owner, and that there are no CPUs to be had.

    Args:
        read: reads on from where the stream stands.
        replan: asks for the plan again; False if it is the one that there was, and something else was lost.
        wait_no_longer: makes ``read`` do with the CPUs that there are.
        name: of the dataset.
    """
    while True:
        try:
            yield from read()
            return
        except OwnerDiedError:
            if not replan():
                raise
            _logger.warning(
                "The planner of dataset %r died and was started again; the epoch was planned again, and reading goes "
                "on at the next row.",
                name,
            )
        except CpusHeldError:
            wait_no_longer()


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


class Iteration:
    """One iteration over a stream. A stream has one at a time: the next one ends it, and it says so if it is asked."""

    def __init__(self, batches: Generator[Any, None, None], name: str) -> None:
        self._batches = batches
        self._name = name
        self._ended = False

    @property
    def is_live(self) -> bool:
        """Whether it has begun and not come to its end."""
        return inspect.getgeneratorstate(self._batches) in (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StreamUsageError(
                f"This iteration of {self._name!r} was ended by another one, which goes on from where it stood. A "
                "stream has one position, so only one loop over it can run at a time; for samples on the side make a "
                "second stream."
            )
        self._refuse_other_thread()
        return next(self._batches)

    def close(self) -> None:
        """Stop here; the stream keeps its position."""
        self._refuse_other_thread()
        self._batches.close()

    def end_for_another(self) -> None:
        """Stop here, because another iteration begins."""
        finished = inspect.getgeneratorstate(self._batches) == inspect.GEN_CLOSED
        self.close()
        self._ended = not finished

    def _refuse_other_thread(self) -> None:
        if inspect.getgeneratorstate(self._batches) == inspect.GEN_RUNNING:
            raise StreamUsageError(
                f"Another thread is waiting for a batch of {self._name!r}. A stream delivers to one thread at a time."
            )
