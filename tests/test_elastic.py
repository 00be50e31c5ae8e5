"""``ElasticTorchTrainer``: which world sizes it may pick, what it refuses, and a run whose nodes come and go."""

from __future__ import annotations

import itertools
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml  # type: ignore[import-untyped]
from ray.train import DataConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lance_ray_stream as lrs
from lance_ray_stream.elastic import LegalWorldSizes, legal_world_sizes
from lance_ray_stream.errors import InvalidArgumentError, LayoutError, UnsupportedOperatorError
from lance_ray_stream.ray_internals.train import elastic_policy
from tests import elastic_cluster
from tests.probes import CountedPlans
from tests.tables import ids_of, make_table

ROOT = Path(__file__).parents[1]

on_ray = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def elastic(low: int, high: int) -> ScalingConfig:
    num_workers: Any = (low, high)  # the annotation of ScalingConfig leaves the pair out
    return ScalingConfig(num_workers=num_workers)


# --- Rounding down ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [2, 4, 8], [6, 3, 12], [5]])
def test_the_largest_legal_size_that_fits(sizes):
    choose = LegalWorldSizes(sizes)
    for possible in range(20):
        assert choose(possible) == max((size for size in sizes if size <= possible), default=0)


def test_what_stays_unused_is_logged_once_with_the_reason(caplog):
    choose = LegalWorldSizes([2, 4, 8])
    with caplog.at_level(logging.WARNING, logger="lance_ray_stream"):
        for possible in (8, 4, 7, 7, 7, 2, 7, 1, 0):
            choose(possible)
    unused = [record.getMessage() for record in caplog.records]
    assert len(unused) == 3, "7 was new twice, 1 once; 8, 4, 2 and 0 leave nothing unused"
    assert unused[0] == unused[1]
    assert "room for 7 workers; 3 of them stay unused" in unused[0]
    assert "2, 4 or 8 workers" in unused[0]
    assert "room for 1 workers; 1 of them stay unused" in unused[2]


def test_rays_policy_with_legal_sizes():
    """Ray's own count of the places, rounded down; and no more nodes are asked for than can be used."""
    policy = elastic_policy(elastic(2, 7), LegalWorldSizes([2, 4]), ask_for=4)
    assert policy._get_num_workers_for_resource_request() == 4
    places = [policy._count_possible_workers({"a": {"CPU": 1}, "b": {"CPU": cpus}}) for cpus in range(9)]
    assert places == [0, 2, 2, 4, 4, 4, 4, 4, 4]


# --- What is legal ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return make_table(tmp_path_factory.mktemp("db"), 240)


def sizes_of(table: Any, num_splits: list[int], num_workers: Any, readers: int = 1) -> list[int]:
    """The legal sizes for streams with these numbers of splits, beside a dataset that is none."""
    datasets = {f"stream{i}": lrs.read_stream(table, num_splits=splits) for i, splits in enumerate(num_splits)}
    datasets["plain"] = ray.data.range(10)
    config = lrs.StreamDataConfig(num_workers=readers)
    return legal_world_sizes(datasets, config, ScalingConfig(num_workers=num_workers))


class TestLegalWorldSizes:
    pytestmark = on_ray

    @pytest.mark.parametrize(
        ("num_splits", "num_workers", "readers", "legal"),
        [
            ([48], (1, 64), 1, [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]),
            ([48], (5, 11), 1, [6, 8]),
            ([48], (4, 16), 4, [4, 6, 12]),
            ([48, 36], (1, 64), 1, [1, 2, 3, 4, 6, 12]),
            ([48, 36], (1, 64), 2, [1, 2, 3, 6]),
            ([8], (1, 1), 1, [1]),
            ([8], 4, 1, [4]),
            ([8], 0, 1, [1]),  # Ray's local mode
        ],
    )
    def test_for_every_stream_and_its_reader_workers(self, table, num_splits, num_workers, readers, legal):
        assert sizes_of(table, num_splits, num_workers, readers) == legal

    @pytest.mark.parametrize(
        ("num_splits", "num_workers", "readers", "says"),
        [
            (
                [8],
                (5, 7),
                1,
                ["num_workers=(5, 7)", "'stream0' has num_splits=8", "sizes: 4 and 8.", "of 7;", "of 210."],
            ),
            ([8], (9, 12), 1, ["sizes: 8.", "12 workers: multiples of 12;"]),
            ([8], (3, 3), 2, ["sizes: 2 and 4.", "3 workers: multiples of 6."]),
            ([8], 3, 1, ["ScalingConfig(num_workers=3)", "sizes: 2 and 4.", "3 workers: multiples of 3."]),
            ([8], (1, 8), 3, ["StreamDataConfig(num_workers=3)", "sizes: none.", "8 workers: multiples of 24;"]),
            ([8, 9], (2, 9), 1, ["'stream0' has num_splits=8, 'stream1' has num_splits=9", "sizes: 1."]),
            ([8], (100, 200), 1, ["sizes: 8.", "200 workers: multiples of 200."]),
        ],
    )
    def test_c54_a_range_without_a_legal_size(self, table, num_splits, num_workers, readers, says):
        with pytest.raises(LayoutError) as error:
            sizes_of(table, num_splits, num_workers, readers)
        assert [part for part in says if part not in str(error.value)] == []

    def test_the_advice_serves(self, table):
        """What the error of (5, 7) names makes the largest, or every, size of the range legal."""
        assert 7 in sizes_of(table, [14], (5, 7))
        assert sizes_of(table, [210], (5, 7)) == [5, 6, 7]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("most", "said"), [(8, []), (10, ["At most 8 workers are asked for, not 10"])])
def test_a_maximum_that_is_not_legal(table, caplog, most, said):
    lrs.ElasticTorchTrainer(
        print,
        scaling_config=elastic(2, most),
        datasets={"train": lrs.read_stream(table, num_splits=48)},
        dataset_config=lrs.StreamDataConfig(),
    )
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("lance_ray_stream")]
    assert [line.partition(":")[0] for line in logged] == said


class TestRefusedBeforeAnythingStarts:
    pytestmark = on_ray

    @pytest.fixture
    def make(self, table, monkeypatch):
        """Makes a trainer; a test whose trainer is not refused at once fails."""
        monkeypatch.setattr(TorchTrainer, "__init__", lambda *_, **__: pytest.fail("Ray's trainer was made"))

        def make(**changes: Any) -> Any:
            arguments: dict[str, Any] = {
                "scaling_config": elastic(1, 8),
                "datasets": {"train": lrs.read_stream(table, num_splits=8)},
                "dataset_config": lrs.StreamDataConfig(),
            }
            return lrs.ElasticTorchTrainer(print, **arguments | changes)

        return make

    def test_no_legal_size(self, make):
        with pytest.raises(LayoutError, match="Nearest legal world sizes: 2 and 4"):
            make(scaling_config=elastic(3, 3))

    def test_a_minimum_of_no_workers(self, make):
        with pytest.raises(InvalidArgumentError, match=r"num_workers=\(0, 4\).*least that works is 1"):
            make(scaling_config=elastic(0, 4))

    def test_rays_own_data_config(self, make):
        with pytest.raises(InvalidArgumentError, match=r"dataset_config=StreamDataConfig.*got DataConfig"):
            make(dataset_config=DataConfig())

    @pytest.mark.parametrize(("datasets", "names"), [({}, "there are none"), ({"a": 1, "b": 2}, "a, b")])
    def test_no_stream(self, make, datasets, names):
        with pytest.raises(InvalidArgumentError, match=re.escape(f"None of the datasets ({names})")):
            make(datasets={name: ray.data.range(rows) for name, rows in datasets.items()})

    def test_splits_that_follow_the_world_size(self, make, table):
        datasets = {"one": lrs.read_stream(table, num_splits=8), "two": lrs.read_stream(table)}
        with pytest.raises(InvalidArgumentError, match=r"'two' has num_splits=None.*for_world_sizes"):
            make(datasets=datasets)

    def test_a_transform_that_loses_rows(self, make, table):
        with pytest.raises(UnsupportedOperatorError, match="'train' uses limit=5"):
            make(datasets={"train": lrs.read_stream(table, num_splits=8).limit(5)})


# --- The manifest for Kubernetes ---------------------------------------------------------------------


def test_the_manifest_fits_together():
    """It parses; one image everywhere; the head is counted and stays; GPUs scale to the largest legal size."""
    (job,) = yaml.safe_load_all((ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert ray.__version__ == cluster["rayVersion"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] != "0", "Ray Train does not count such a head node"
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert sorted(groups) == ["cpu", "gpu"]
    for group in groups.values():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    pods = [group["template"]["spec"] for group in [cluster["headGroupSpec"], *groups.values()]]
    containers = [container for pod in pods for container in pod["containers"]]
    assert len(containers) == len(pods) == 3
    assert len({container["image"] for container in containers}) == 1
    for pod, container in zip(pods, containers, strict=True):
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
        assert "env" not in container, "credentials come from a secret"
    gpus = [container["resources"]["limits"].get("nvidia.com/gpu") for container in containers]
    assert gpus == [None, "1", None]
    assert groups["gpu"]["maxReplicas"] in lrs.SplitLayout(48).world_sizes()


# --- A run whose nodes come and go -----------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(400)
def test_c13_c54_nodes_join_and_leave(tmp_path):
    """2 -> 4 -> 2 workers; 3 are refused on the way; the rows are those of an undisturbed run."""
    table = make_table(tmp_path, elastic_cluster.ROWS)
    run_elastic(tmp_path, timeout_s=360)
    unused = json.loads((tmp_path / "unused.json").read_text())
    assert any("room for 3 workers; 1 of them stay unused" in line for line in unused)

    attempts = elastic_cluster.attempts(tmp_path)
    assert [{line["world"] for line in lines} for lines in attempts] == [{2}, {4}, {2}]
    assert [min(line["step"] for line in lines) for lines in attempts] == [0, 4, 16], "each from the latest checkpoint"
    ends = [4, 16, elastic_cluster.EPOCHS * elastic_cluster.STEPS_PER_EPOCH]
    kept = [steps_of(lines) for lines in attempts]
    planned = planned_steps(table)
    for steps in kept:
        assert all(ids == planned[step] for step, ids in steps.items()), "steps that are done again, too"
    # What counts: each attempt as far as the checkpoint that the next one began from.
    history = [kept[i][step] for i, end in enumerate(ends) for step in range(min(kept[i]), end)]
    assert history == planned
    for epoch in range(elastic_cluster.EPOCHS):
        of_epoch = history[epoch * elastic_cluster.STEPS_PER_EPOCH :][: elastic_cluster.STEPS_PER_EPOCH]
        assert sorted(itertools.chain(*of_epoch)) == list(range(elastic_cluster.ROWS)), "every row exactly once"

    builders = CountedPlans(str(tmp_path), "rows").builders()
    assert len(builders) == elastic_cluster.EPOCHS + 1, "each epoch, and the one after the last ahead of its time, once"
    assert len(set(builders)) == 1, "by a planner that outlived the workers"


def run_elastic(out: Path, *, timeout_s: float) -> None:
    """Run it; a failure shows what it printed. It and its nodes are ended if they take longer."""
    command = [sys.executable, "-m", "tests.elastic_cluster", str(out)]
    with open(out / "output.txt", "w+") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            run.wait(timeout_s)
        except subprocess.TimeoutExpired:
            run.kill()  # its nodes end with it
            run.wait(30)
        output.seek(0)
        assert run.returncode == 0, output.read()


def steps_of(lines: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Step -> the sorted ids of all ranks, without a step in which ranks were stopped before they had their part."""
    steps: dict[int, list[list[int]]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line["ids"])
    return {step: sorted(itertools.chain(*ids)) for step, ids in steps.items() if len(ids) == lines[0]["world"]}


def planned_steps(table: Any) -> list[list[int]]:
    """The sorted ids of all steps, from the plan alone."""
    dataset = lrs.read_stream(table, num_splits=elastic_cluster.NUM_SPLITS)
    plans = [lrs.plan_epoch(dataset, epoch) for epoch in range(elastic_cluster.EPOCHS)]
    steps = itertools.product(plans, range(elastic_cluster.STEPS_PER_EPOCH))
    size = elastic_cluster.GLOBAL_BATCH_SIZE
    return [sorted(ids_of(table, plan.row_ids_of_step(step, size))) for plan, step in steps]
