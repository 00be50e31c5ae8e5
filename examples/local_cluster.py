"""A Ray cluster whose nodes, all on this machine, can join and leave while a job runs: to try elastic training out."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster


class LocalCluster:
    """A head node for the driver, and worker nodes with places for so many train workers each.

    A place is the custom resource ``slot``, as a GPU would be: ``ScalingConfig(resources_per_worker={"slot": 1})``.

    Args:
        head_cpus: logical CPUs of the head node, for reads and transforms.
    """

    def __init__(self, *, head_cpus: int = 4) -> None:
        self._head_cpus = head_cpus
        # Ray puts Unix sockets there, whose paths may have about 100 bytes.
        self._temp_dir = tempfile.mkdtemp(prefix="lrs", dir="/tmp")

    def __enter__(self) -> LocalCluster:
        self._cluster = Cluster()
        # Ray notes the cluster's address in this folder, and expects it to be there: on a new machine it is not.
        Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray").mkdir(exist_ok=True)
        try:
            self._start_node(self._head_cpus, include_dashboard=False)
            ray.init(address=self._cluster.address, log_to_driver=False)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def add_node(self, slots: int) -> Any:
        """A node joins that has places for ``slots`` train workers, and a CPU."""
        return self._start_node(1, resources={"slot": slots})

    def remove_node(self, node: Any) -> None:
        """A node leaves, and what runs on it is killed. Its last word is that it leaves, so Ray need not find out."""
        self._cluster.remove_node(node)

    def look_again(self) -> None:
        """Have Ray count the nodes now; by itself it does so every 20 seconds."""
        name = "AutoscalingCoordinator"
        with contextlib.suppress(ValueError):  # it comes with the first trainer
            ray.get(ray.get_actor(name, namespace=name).get_reserved_resources.remote("", recompute=True))

    def logged(self, text: str) -> list[str]:
        """Lines with ``text`` that processes of the cluster have logged."""
        logs = Path(self._temp_dir).glob("session_latest/logs/*.err")
        return [line for log in logs for line in log.read_text(errors="replace").splitlines() if text in line]

    def _start_node(self, num_cpus: int, **options: Any) -> Any:
        return self._cluster.add_node(
            num_cpus=num_cpus, object_store_memory=150_000_000, temp_dir=self._temp_dir, **options
        )
