"""Training functions that the tests run on real Ray Train workers, and what those workers write down."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import ray.train
import torch
from ray.data.collate_fn import ArrowBatchCollateFn
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lance_ray_stream as lrs
from lance_ray_stream import datasource, feed
from tests.faults import fail_late, wait_until
from tests.user_functions import OwnError

Config = dict[str, Any]


def write_down(config: Config, rank: int, **fields: Any) -> None:
    """Append a line to what this rank of this run has written; it survives the death of the worker."""
    with open(Path(config["out"], f"{config['run']}_{rank}.jsonl"), "a") as file:
        file.write(json.dumps(fields) + "\n")


def written(out: Path, run: str) -> dict[int, list[dict[str, Any]]]:
    """Rank -> its lines."""
    lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(out.glob(f"{run}_*.jsonl")):
        rank = int(path.stem.rpartition("_")[2])
        lines[rank] += [json.loads(line) for line in path.read_text().splitlines()]
    return dict(lines)


def fit(
    loop: Callable[[Config], None],
    tmp_path: Path,
    datasets: dict[str, Any],
    *,
    num_workers: int,
    run: str,
    max_failures: int = 0,
    dataset_config: lrs.StreamDataConfig | None = None,
    **config: Any,
) -> Result:
    """Run ``loop`` on real workers, with checkpoints in ``tmp_path``; it goes on from the latest that is there."""
    tmp_path.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"out": str(tmp_path), "run": run, **config},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=max_failures)
        ),
        datasets=datasets,
        dataset_config=dataset_config or lrs.StreamDataConfig(),
    )
    return trainer.fit()


def with_twice(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A transform: one row per row, one more column."""
    batch["twice"] = batch["id"] * 2
    return batch


class SlowIds(ArrowBatchCollateFn):
    """Collates the ids alone, and sleeps on every second batch."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, batch: pa.Table) -> torch.Tensor:  # type: ignore[override]
        self._calls += 1
        time.sleep(0.02 * (self._calls % 2))
        return torch.tensor(batch["id"].to_pylist())


def read_everything(config: Config) -> None:
    """Two epochs of train and eval streams beside a dataset of Ray's own; a collective in every step."""
    train, evaluation = lrs.get_stream(), lrs.get_stream("eval")
    assert train is ray.train.get_dataset_shard("train"), "the same object"
    rank = ray.train.get_context().get_world_rank()
    assert (train.rank, train.world_size) == (rank, ray.train.get_context().get_world_size())
    for epoch in range(train.epoch, 2):
        train.set_epoch(epoch)
        ids, ends = [], []
        batches = train.iter_torch_batches(batch_size=7, prefetch_batches=8, collate_fn=SlowIds())
        announced = len(batches)
        for batch in batches:
            total = torch.tensor([len(batch)])
            torch.distributed.all_reduce(total)
            ids += batch.tolist()
            ends.append([len(batch), int(total)])
        seen = [int(i) for batch in evaluation.iter_batches(global_batch_size=8) for i in batch["id"]]
        plain = sum(len(batch["id"]) for batch in ray.train.get_dataset_shard("plain").iter_batches(batch_size=10))
        write_down(config, rank, ids=ids, ends=ends, announced=announced, eval=seen, plain=plain)
    write_down(config, rank, **_columns())


def _columns() -> dict[str, Any]:
    """What text and vectors become as torch batches."""
    stream = lrs.get_stream("columns")
    try:
        stream.iter_torch_batches(batch_size=5)
    except lrs.errors.UnsupportedColumnError as error:
        refused = str(error)
    vectors = lrs.get_stream("vectors")
    batch = next(iter(vectors.iter_torch_batches(batch_size=5, dtypes={"id": torch.int32})))
    vector = batch["vector"]
    return {
        "refused": refused,
        "refused_before_the_first_step": sum(stream.state_dict()["samples_consumed_per_split"]) == 0,
        "types": [str(vector.dtype), list(vector.shape), str(batch["id"].dtype)],
        "vector_ids": batch["id"].tolist(),
        "first_values": vector[:, 0].tolist(),
    }


def train_with_checkpoints(config: Config) -> None:
    """Steps until ``stop_at``, a checkpoint every four; rank 1 is killed once, at ``kill_at``."""
    stream = lrs.get_stream()
    step = _load(stream)
    for epoch in range(stream.epoch, config["epochs"]):
        stream.set_epoch(epoch)
        for batch in stream.iter_batches(global_batch_size=config["global_batch_size"]):
            write_down(config, stream.rank, step=step, epoch=epoch, ids=batch["id"].tolist())
            step += 1
            if step % 4 == 0:
                _save(stream, step)
            if step == config["kill_at"] and stream.rank == 1 and _first_time(config):
                _wait_until_saved(step // 4 * 4)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == config["stop_at"]:
                return


def _first_time(config: Config) -> bool:
    try:
        Path(config["out"], "killed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _wait_until_saved(step: int) -> None:
    """A checkpoint counts once the controller has seen every rank's report."""
    mode = ray.train.CheckpointConsistencyMode.COMMITTED
    for _ in range(600):
        if any(saved.metrics["step"] == step for saved in ray.train.get_all_reported_checkpoints(mode)):
            return
        time.sleep(0.1)


def _save(stream: lrs.StreamIterator, step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if stream.rank == 0:
            Path(folder, "state.json").write_text(json.dumps({"step": step, "stream": stream.state_dict()}))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def _load(stream: lrs.StreamIterator) -> int:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = json.loads(Path(folder, "state.json").read_text())
    stream.load_state_dict(saved["stream"])
    return int(saved["step"])


def train_a_model(config: Config) -> None:
    """Two epochs of a small network under DistributedDataParallel, each rank's loss weighted by its share."""
    stream = lrs.get_stream()
    torch.manual_seed(7)
    model = ray.train.torch.prepare_model(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = 0
    for epoch in range(2):
        stream.set_epoch(epoch)
        for batch in stream.iter_torch_batches():
            target = torch.sin(batch["id"].float())
            loss = torch.nn.functional.mse_loss(model(batch["vector"] / 100).squeeze(1), target)
            optimizer.zero_grad()
            (loss * stream.gradient_weight).backward()
            optimizer.step()
            steps += 1
    parameters = [float(value) for tensor in model.parameters() for value in tensor.flatten()]
    write_down(config, stream.rank, parameters=parameters, steps=steps)


def read_in_local_mode(config: Config) -> None:
    """Stops in mid-epoch, asks for its stream again, goes on from a state."""
    stream = lrs.get_stream()
    ids: list[int] = []
    for batch in stream.iter_torch_batches(global_batch_size=16, collate_fn=SlowIds()):
        ids += batch.tolist()
        if len(ids) == 64:
            break
    again = lrs.get_stream()
    state = again.state_dict()
    again.load_state_dict(state)
    ids += [int(i) for batch in again.iter_batches(global_batch_size=16) for i in batch["id"]]
    write_down(config, stream.rank, ids=ids, state=state, same=again is stream, world_size=stream.world_size)


def read_five_epochs(config: Config) -> None:
    """Writes down, too, whether an epoch had begun before it was asked for."""
    stream = lrs.get_stream()
    for epoch in range(5):
        prepared = stream._reader._next._preparation is not None
        ids = [int(i) for batch in stream.iter_batches(global_batch_size=96) for i in batch["id"]]
        write_down(config, stream.rank, epoch=epoch, prepared=prepared, ids=ids)


def clean_up_after_an_epoch(config: Config) -> None:
    """Two epochs, read by processes of their own; rank 0 has the table cleaned up once both ranks ended the first."""
    stream = lrs.get_stream()
    for epoch in range(2):
        stream.set_epoch(epoch)
        ids = [int(i) for batch in stream.iter_batches(global_batch_size=16) for i in batch["id"]]
        torch.distributed.barrier()
        refused = _clean_up(Path(config["out"])) if stream.rank == 0 and epoch == 0 else ""
        write_down(config, stream.rank, ids=ids, refused=refused)
        torch.distributed.barrier()


def _clean_up(path: Path) -> str:
    table = lancedb.connect(path).create_table("rows", [{"id": 1}], mode="overwrite")
    try:
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def rank_0_stops(config: Config) -> None:
    """Rank 0 stops after a batch, and goes on when all others have read their epoch."""
    feed.FIRST_WINDOW_ROWS, datasource.MAX_WINDOW_ROWS = 8, 64
    stream = lrs.get_stream()
    loop = iter(stream.iter_batches(batch_size=8))
    ids = next(loop)["id"].tolist()
    stopped, others = Path(config["out"], "stopped"), range(1, stream.world_size)
    if stream.rank == 0:
        time.sleep(1)  # for its reads to come to a halt
        stopped.touch()
        wait_until(lambda: all(Path(config["out"], f"done_{rank}").exists() for rank in others), timeout_s=90)
    else:
        wait_until(stopped.exists, timeout_s=90)
    ids += [int(i) for batch in loop for i in batch["id"]]
    Path(config["out"], f"done_{stream.rank}").touch()
    write_down(config, stream.rank, ids=ids)


def validate_in_mid_epoch(config: Config) -> None:
    """Reads all of a second stream and of a plain dataset after steps 3 and 6 of the first, whose loop is live."""
    train, evaluation, plain = lrs.get_stream(), lrs.get_stream("eval"), ray.train.get_dataset_shard("plain")
    ids: list[int] = []
    validated: dict[str, list[list[int]]] = {"eval": [], "plain": []}
    for step, batch in enumerate(train.iter_torch_batches(global_batch_size=16), start=1):
        ids += batch["id"].tolist()
        if step in (3, 6):
            for name, dataset in (("eval", evaluation), ("plain", plain)):
                seen = [int(i) for part in dataset.iter_batches(batch_size=16) for i in part["id"]]
                validated[name].append(sorted(seen))
    write_down(config, train.rank, train=ids, **validated)


def read_one_epoch(config: Config) -> None:
    """Writes down what it received."""
    stream = lrs.get_stream()
    ids = [int(i) for batch in stream.iter_batches(global_batch_size=16) for i in batch["id"]]
    write_down(config, stream.rank, ids=ids)


def read_nothing(config: Config) -> None:
    """A loop that asks for its streams and reads none."""
    write_down(config, lrs.get_stream().rank)


class FailingCollate(ArrowBatchCollateFn):
    """A collate function that comes to a row which it cannot handle."""

    def __call__(self, batch: pa.Table) -> torch.Tensor:  # type: ignore[override]
        fail_late({"id": batch["id"].to_pylist()})
        return torch.tensor(batch["id"].to_pylist())


def fail_somewhere(config: Config) -> None:
    """Fails where ``config["where"]`` says, in the middle of the epoch; every step is a collective."""
    stream = lrs.get_stream()
    collate = FailingCollate() if config["where"] == "collate function" else SlowIds()
    for step, ids in enumerate(stream.iter_torch_batches(global_batch_size=16, collate_fn=collate)):
        if config["where"] == "training function" and stream.rank == 1 and step == 3:
            raise OwnError("cannot handle step 3")
        torch.distributed.all_reduce(torch.tensor([len(ids)]))


def train_until_told(config: Config) -> None:
    """A checkpoint every four steps; waits after step 6 for the file ``go``."""
    stream = lrs.get_stream()
    step = _load(stream)
    for batch in stream.iter_batches(global_batch_size=16):
        write_down(config, stream.rank, step=step, ids=batch["id"].tolist())
        step += 1
        if step % 4 == 0:
            _save(stream, step)
        if step == 6:
            _wait_until_saved(4)
            Path(config["out"], f"waiting_{stream.rank}").touch()
            while not Path(config["out"], "go").exists():
                time.sleep(0.05)
