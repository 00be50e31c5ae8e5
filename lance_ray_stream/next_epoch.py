"""The next epoch, begun in the background before the present one has ended."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

# How long what was begun waits for its epoch, counted from the end of the one before: time for a validation or a
# checkpoint. After that, a trainer that has come to its end holds no memory for an epoch that never comes.
KEPT_S = 30.0


class Begun(Protocol):
    """What can be begun, and ended before anyone has used it."""

    def stop(self) -> None:
        """End it, and let go of what it holds."""
        ...


BegunT = TypeVar("BegunT", bound=Begun)


class Preparation(Generic[BegunT]):
    """Something that is begun in a thread of its own, and either taken or dropped."""

    def __init__(self, begin: Callable[[], BegunT]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._begun: BegunT | None = None
        self._error: BaseException | None = None
        self._dropped = False
        self._thread = threading.Thread(target=self._run, name="lance_ray_stream next epoch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            begun = self._begin()
        except BaseException as error:  # for the one who takes it
            self._error = error
            return
        with self._lock:
            if not self._dropped:
                self._begun = begun
                return
        begun.stop()

    def take(self) -> BegunT | None:
        """What was begun, once it is; None if it was dropped or taken before.

        Raises:
            BaseException: what went wrong while it was begun.
        """
        self._thread.join()
        with self._lock:
            begun, self._begun = self._begun, None
            self._dropped = True
        if self._error is not None:
            raise self._error
        return begun

    def drop(self) -> None:
        """Stop it, at once or as soon as it is begun."""
        with self._lock:
            begun, self._begun = self._begun, None
            self._dropped = True
        if begun is not None:
            begun.stop()


class NextEpoch(Generic[BegunT]):
    """At most one epoch that was begun ahead of its time. Dropped with this object."""

    def __init__(self) -> None:
        self._epoch = 0
        self._preparation: Preparation[BegunT] | None = None
        self._owned: weakref.finalize[Any, Any] | None = None
        self._timer: threading.Timer | None = None

    def __reduce__(self) -> tuple[type[NextEpoch[BegunT]], tuple[()]]:
        return NextEpoch, ()  # what has begun stays in its process

    def prepare(self, epoch: int, begin: Callable[[], BegunT]) -> None:
        """Begin ``epoch`` in the background; does nothing where one is prepared already."""
        if self._preparation is None:
            self._epoch, self._preparation = epoch, Preparation(begin)
            self._owned = weakref.finalize(self, self._preparation.drop)
            self._owned.atexit = False

    def take(self, epoch: int) -> BegunT | None:
        """What was begun, if it is ``epoch``, else None, and it is dropped."""
        preparation, prepared = self._forget(), self._epoch
        if preparation is None:
            return None
        if prepared == epoch:
            return preparation.take()
        preparation.drop()
        return None

    def keep_for_a_while(self) -> None:
        """Its time has come; drop it if nobody takes it within :data:`KEPT_S`."""
        if self._preparation is not None:
            self._timer = threading.Timer(KEPT_S, self._preparation.drop)
            self._timer.daemon = True
            self._timer.start()

    def drop(self) -> None:
        """Forget it."""
        preparation = self._forget()
        if preparation is not None:
            preparation.drop()

    def _forget(self) -> Preparation[BegunT] | None:
        if self._timer is not None:
            self._timer.cancel()
        if self._owned is not None:
            self._owned.detach()
        preparation = self._preparation
        self._preparation = self._owned = self._timer = None
        return preparation
