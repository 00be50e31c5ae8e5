"""Train a small network from a LanceDB table, lose a worker in mid-epoch, go on with twice as many.

1. Two workers train until one of them is killed, as a spot node would be.
2. Four workers go on from the latest checkpoint, to the end.
3. What every rank received is compared, step by step, with the plan of an uninterrupted run.

To copy for your own training: ``train_loop``, ``save_checkpoint``, ``load_checkpoint`` and ``fit``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from digits_data import write_digits
from lancedb.table import Table
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import lance_ray_stream as lrs

NUM_SPLITS = 12  # works for 1, 2, 3, 4, 6 and 12 workers
GLOBAL_BATCH_SIZE = 96  # a multiple of NUM_SPLITS: each step takes 8 rows of every split
STEPS_PER_EPOCH = 15  # 1440 rows
EPOCHS = 8
CHECKPOINT_EVERY = 6  # steps; not a divisor of an epoch's 15, so that most checkpoints lie in mid-epoch
KILL_AT = 3 * STEPS_PER_EPOCH + 8  # the ninth step of the fourth epoch
MIN_ACCURACY = 0.95

DATA = Path(__file__).resolve().parents[1] / ".data" / "digits"
RUN = DATA.with_name("digits_run")  # checkpoints, and what each rank received


def make_net() -> nn.Module:
    """A convolutional network for images of shape (B, 1, 8, 8); returns logits of shape (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def decode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Ordinary Ray Data, on any CPU of the cluster: (B, 64) pixels to (B, 1, 8, 8) images."""
    batch["image"] = np.stack(list(batch["image"])).reshape(-1, 1, 8, 8)
    return batch


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    torch.manual_seed(0)
    stream = lrs.get_stream()
    net = make_net()
    model = prepare_model(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    step = load_checkpoint(net, optimizer, stream)

    with open(RUN / f"received_{config['run']}_{stream.rank}.jsonl", "w", buffering=1) as received:
        for epoch in range(stream.epoch, EPOCHS):
            stream.set_epoch(epoch)  # stays where it is if the checkpoint was made in this epoch
            for batch in stream.iter_torch_batches(global_batch_size=GLOBAL_BATCH_SIZE):
                received.write(json.dumps({"step": step, "ids": batch["id"].tolist()}) + "\n")
                if step == config["kill_at"] and stream.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)  # no clean-up, no last word

                loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1

                if step % CHECKPOINT_EVERY == 0:
                    save_checkpoint(net, optimizer, stream, step, loss.item())


def save_checkpoint(
    net: nn.Module, optimizer: torch.optim.Optimizer, stream: lrs.StreamIterator, step: int, loss: float
) -> None:
    """All ranks report; at a step's end the position of one rank is that of all, so rank 0 alone writes."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if stream.rank == 0:
            weights = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(weights, Path(folder, "model.pt"))
            Path(folder, "state.json").write_text(json.dumps({"step": step, "stream": stream.state_dict()}))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"step": step, "loss": loss}, checkpoint=checkpoint)


def load_checkpoint(net: nn.Module, optimizer: torch.optim.Optimizer, stream: lrs.StreamIterator) -> int:
    """Go back to the latest checkpoint, if there is one; returns the number of steps done by then."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        weights = torch.load(Path(folder, "model.pt"))
        state = json.loads(Path(folder, "state.json").read_text())
    net.load_state_dict(weights["net"])
    optimizer.load_state_dict(weights["optimizer"])
    stream.load_state_dict(state["stream"])  # whatever the number of workers was
    return int(state["step"])


def fit(dataset: ray.data.Dataset, *, num_workers: int, run: str, kill_at: int | None = None) -> Result:
    """One training job. A job of the same name and storage path goes on from the latest checkpoint."""
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"run": run, "kill_at": kill_at},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="train_digits", storage_path=str(RUN), failure_config=FailureConfig(max_failures=0)),
        datasets={"train": dataset},
        dataset_config=lrs.StreamDataConfig(),
    )
    return trainer.fit()


def received_ids(run: str) -> dict[int, list[int]]:
    """Step -> the ids that the ranks of a run received, all ranks together, sorted."""
    steps: dict[int, list[int]] = defaultdict(list)
    for path in RUN.glob(f"received_{run}_*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            steps[record["step"]] += record["ids"]
    return {step: sorted(ids) for step, ids in steps.items()}


def planned_ids(dataset: ray.data.Dataset, table: Table) -> list[list[int]]:
    """Step -> the sorted ids of an uninterrupted run, from the plan alone: nothing is streamed for it."""
    rows = table.search().with_row_id(True).select(["id"]).to_arrow()
    id_of_row = dict(zip(rows["_rowid"].to_pylist(), rows["id"].to_pylist(), strict=True))
    steps = []
    for epoch in range(EPOCHS):
        plan = lrs.plan_epoch(dataset, epoch)
        for step in range(STEPS_PER_EPOCH):
            row_ids = plan.row_ids_of_step(step, GLOBAL_BATCH_SIZE)
            steps.append(sorted(id_of_row[row_id] for row_id in row_ids.tolist()))
    return steps


def compare(planned: list[list[int]], runs: dict[str, dict[int, list[int]]]) -> bool:
    """Print a table of all steps, a line each; True if every run received the planned global batches."""
    print(f"\n{'step':>5} {'epoch':>5}  {'planned ids':<22}" + "".join(f"{run:<20}" for run in runs))
    right = True
    for step, ids in enumerate(planned):
        cells = [verdict(received.get(step), ids, step == KILL_AT) for received in runs.values()]
        right &= "DIFFERENT" not in cells and any(cell.startswith("same") for cell in cells)
        first = " ".join(f"{i:4}" for i in ids[:3]) + " ..."
        print(f"{step:5} {step // STEPS_PER_EPOCH:5}  {first:<22}" + "".join(f"{cell:<20}" for cell in cells))
    return right


def verdict(received: list[int] | None, planned: list[int], killed: bool) -> str:
    """What to say of one step of one run."""
    if received is None:
        return "-"
    if received == planned:
        return f"same {len(received)} rows"
    # The victim's neighbour may or may not have received its part before the job came down.
    return f"killed ({len(received)} rows)" if killed and set(received) < set(planned) else "DIFFERENT"


def test_accuracy(checkpoint: Checkpoint, table: Table) -> float:
    """Share of the test images that the checkpoint's network gets right."""
    net = make_net()
    with checkpoint.as_directory() as folder:
        net.load_state_dict(torch.load(Path(folder, "model.pt"))["net"])
    rows = table.to_arrow()
    images = torch.tensor(rows["image"].to_pylist()).reshape(-1, 1, 8, 8)
    with torch.inference_mode():
        predicted = net(images).argmax(dim=1)
    return float((predicted == torch.tensor(rows["label"].to_pylist())).float().mean())


def start_ray() -> None:
    """Use the cluster that runs, such as that of ``ray job submit``, or start one here."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:  # eight logical CPUs, whatever the machine has: four workers, and four for their reads
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)


def main() -> int:
    """Run it all; the exit status is 0 if the network is good and the batches were the planned ones."""
    # The steps of this small job take milliseconds: let Ray Train collect reports more often.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    # LanceDB warns of forks; Ray forks only to start other programs, so no harm is done.
    warnings.filterwarnings("ignore", message="lancedb fork support")
    start_ray()
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    train_table, test_table = write_digits(DATA)
    dataset = lrs.read_stream(train_table, num_splits=NUM_SPLITS, shuffle_seed=42).map_batches(decode)

    print(f"2 workers, one of them dies at step {KILL_AT} ...", flush=True)
    try:
        fit(dataset, num_workers=2, run="2 workers", kill_at=KILL_AT)
    except ray.train.WorkerGroupError as error:
        print(f"... as expected: the job ended, failed ranks: {sorted(error.worker_failures)}")
    else:
        print("... it did not", file=sys.stderr)
        return 1

    print("4 workers go on from the latest checkpoint ...", flush=True)
    result = fit(dataset, num_workers=4, run="4 workers")
    assert result.checkpoint is not None

    runs = {run: received_ids(run) for run in ("2 workers", "4 workers")}
    planned = planned_ids(dataset, train_table)
    right = compare(planned, runs)
    accuracy = test_accuracy(result.checkpoint, test_table)
    resumed_at = min(runs["4 workers"])
    print(f"\nThe latest checkpoint held {resumed_at} steps; what was done after it was done again.")
    print(f"{'Every' if right else 'NOT every'} global batch is that of an uninterrupted run.")
    print(f"Test accuracy {accuracy:.3f} (at least {MIN_ACCURACY} is asked for)")
    return 0 if right and accuracy > MIN_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
