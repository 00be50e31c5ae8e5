"""One local Ray for the whole test session, away from any other Ray on the machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

# Ray reads these when it is imported or started, and hands them down to its processes.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import pytest

NUM_LOGICAL_CPUS = 8
OBJECT_STORE_BYTES = 1 << 30


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with 8 logical CPUs, however many the machine has: enough for trainers and their reads."""
    import ray
    from ray.data import DataContext

    # Ray puts Unix sockets there, whose paths may have about 100 bytes: pytest's own folders are too deep.
    temp_dir = tempfile.mkdtemp(prefix="lrs", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=NUM_LOGICAL_CPUS,
        num_gpus=0,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=temp_dir,
    )
    DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture
def quick_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take milliseconds here: Ray Train collects reports and deaths more often."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
