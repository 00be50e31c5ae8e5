"""What the failure tests break streams with, and what of the cluster is in use."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from lancedb.table import LanceTable
from ray._private.state import actors
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from lance_ray_stream import TableRef
from tests.probes import RecordedTable
from tests.user_functions import Doubler, OwnError

# One of each for the whole cluster, from the first execution on.
RAY_DATA_ACTORS = {"_AutoscalingCoordinatorActor", "_StatsActor"}


def first_time(folder: str | Path, what: str) -> bool:
    """Whether this is the first call, in any process."""
    try:
        Path(folder, f"{what}.done").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    """This process is killed, as by the kernel when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may take a moment


class MortalTable(RecordedTable):
    """A table whose third read of rows is cut short once: the process that reads is killed in mid-window."""

    dies_at = 3

    def on_read(self, num_rows: int, columns: list[str] | None) -> None:
        super().on_read(num_rows, columns)
        if len(list(self.reads())) >= self.dies_at and first_time(self.uri, "reader_killed"):
            die()


class MortalInNextEpoch(MortalTable):
    """Dies in the tenth read: after the nine windows of an epoch of 480 rows."""

    dies_at = 10


class SlowReads(RecordedTable):
    """A table whose every read of rows takes a fifth of a second."""

    def on_read(self, num_rows: int, columns: list[str] | None) -> None:
        super().on_read(num_rows, columns)
        time.sleep(0.2 if num_rows else 0)


class DeadlyToActors(TableRef):
    """A table that kills every actor which opens it, such as the planner; read tasks live."""

    def open(self) -> LanceTable:
        """As ``TableRef.open``."""
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
            die()
        return super().open()


class MortalDoubler(Doubler):
    """A transform on actors, one of which is killed in the middle of its second batch, once."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder, self._batches = folder, 0

    def __call__(self, batch):
        self._batches += 1
        if self._batches == 2 and first_time(self._folder, "actor_killed"):
            die()
        return super().__call__(batch)


def fail_late(batch):
    """A transform or collate function that comes to a row which it cannot handle."""
    if max(batch["id"]) > 200:
        raise OwnError("cannot handle row 201")
    return batch


class FailLate:
    """The same on actors."""

    def __call__(self, batch):
        return fail_late(batch)


class Holder:
    """An actor of another job, say, that holds CPUs."""

    def is_there(self) -> bool:
        return True


def nap(seconds: float) -> None:
    """A task that keeps a CPU for a while."""
    time.sleep(seconds)


def kill_actors(class_name: str) -> None:
    """Kill the processes of all actors of this class."""
    pids = [actor["Pid"] for actor in living_actors().values() if class_name in actor["ActorClassName"]]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def forget_controller() -> None:
    """Ray keeps a handle to the latest controller, and so the planner, in its handler of Ctrl-C until the next fit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()


def free_placement_groups() -> None:
    """What Ray Train does within seconds after its controller's death, but only where Ray's dashboard runs."""
    for group_id in placement_group_table():
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))
    for actor in living_actors().values():
        if actor["ActorClassName"] == "PlacementGroupCleaner":
            os.kill(actor["Pid"], signal.SIGKILL)


def living_actors() -> dict[str, Any]:
    """Actor id -> what Ray knows of it."""
    return {key: actor for key, actor in actors().items() if actor["State"] != "DEAD"}


def wait_until(what: Callable[[], Any], *, timeout_s: float) -> None:
    """Wait for ``what`` to be true."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.05)


@dataclass(frozen=True, kw_only=True)
class InUse:
    """What is in use in the cluster."""

    cpus: float
    actors: set[str]  # their ids, without those that Ray Data keeps for the whole cluster
    object_bytes: float

    @classmethod
    def now(cls) -> InUse:
        total, free = ray.cluster_resources(), ray.available_resources()
        cpus, object_bytes = (total[name] - free.get(name, 0.0) for name in ("CPU", "object_store_memory"))
        own = {key for key, actor in living_actors().items() if actor["ActorClassName"] not in RAY_DATA_ACTORS}
        return cls(cpus=cpus, actors=own, object_bytes=object_bytes)


def wait_until_free(before: InUse, *, spare_bytes: float = 500_000, timeout_s: float = 15) -> None:
    """Wait until no CPU is in use, no actor that was not there ``before``, and as good as no more object store."""

    def free() -> bool:
        now = InUse.now()
        few_bytes = now.object_bytes <= before.object_bytes + spare_bytes
        return now.cpus == 0 and now.actors <= before.actors and few_bytes

    try:
        wait_until(free, timeout_s=timeout_s)
    except AssertionError:
        now = InUse.now()
        classes = [living_actors()[key]["ActorClassName"] for key in now.actors - before.actors]
        raise AssertionError(f"still in use after {timeout_s} s: {now}, before: {before}, new: {classes}") from None
