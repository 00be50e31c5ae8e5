"""``verify``: the guarantees, run on the user's own table."""

from __future__ import annotations

import itertools
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from lancedb.streaming import StreamingDataset
from tqdm import tqdm  # lancedb requires it

from lance_ray_stream.backends import Backend, PlanBackend, RankRun, RayBackend, Topology
from lance_ray_stream.cli import one_line
from lance_ray_stream.cli.output import show
from lance_ray_stream.cli.saved import show_position
from lance_ray_stream.cli.stream import Stream, check_fit, stream_of
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import InvalidArgumentError, ReadError, StateMismatchError
from lance_ray_stream.layout import SplitLayout, check_int
from lance_ray_stream.plan import build_plan
from lance_ray_stream.position import is_cycle_boundary, num_batches
from lance_ray_stream.reader import ROW_ID, read_rows
from lance_ray_stream.table import native_error_text
from lance_ray_stream.testing import assert_exact_resume, assert_same_batches, describe_difference

# Without a global batch size, an epoch has about this many steps.
_NUM_STEPS = 32
_MAX_WORLD_SIZE = 8
_BATCH = 1_024  # rows compared at a time


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried.

    Attributes:
        steps: numbers of steps after which a run is saved.
        lancedb_rows: rows of the epoch that are compared with LanceDB's.
    """

    stream: Stream
    plan: EpochPlan
    world_sizes: list[int]
    num_workers: list[int]
    global_batch_size: int
    num_steps: int
    steps: list[int]
    lancedb_rows: int
    ray: bool
    strict: bool

    @property
    def topologies(self) -> list[Topology]:
        """Every pair that shares the splits evenly."""
        pairs = itertools.product(self.world_sizes, self.num_workers)
        return [Topology(*pair) for pair in pairs if not self.plan.num_splits % (pair[0] * pair[1])]

    @property
    def left_out(self) -> str:
        """The pairs that do not, for the verdict."""
        pairs = itertools.product(self.world_sizes, self.num_workers)
        names = [f"{size} x {workers}" for size, workers in pairs if self.plan.num_splits % (size * workers)]
        return f" (not world size x workers {', '.join(names)}, which do not divide num_splits)" if names else ""

    @property
    def options(self) -> dict[str, Any]:
        """What the assertions of :mod:`lance_ray_stream.testing` take."""
        return {
            "world_sizes": self.world_sizes,
            "num_workers": self.num_workers,
            "global_batch_size": self.global_batch_size,
            "epoch": self.plan.epoch,
        }


def run(arguments: Namespace) -> int:
    """One line per guarantee and a verdict; 1 if one does not hold."""
    stream = stream_of(arguments)
    trial = _trial(stream, build_plan(stream.spec, stream.epoch), arguments)
    facts = stream.facts(trial.plan)
    print(
        f"{facts['table']}, version {facts['version']}, epoch {facts['epoch']}: {show(trial.plan.rows)} rows in "
        f"{trial.plan.num_splits} splits of {show(trial.plan.rows_per_split)}, fingerprint {facts['fingerprint']}"
    )
    checks = _checks(stream)
    failed = []
    with _ray_if(trial.ray):
        for name, check in checks.items():
            try:
                print(f"  ok      {name:<8} {check(trial)}", flush=True)
            except (AssertionError, RuntimeError, StateMismatchError) as error:
                failed.append(name)
                print(f"  FAILED  {name:<8} {one_line(error)}", flush=True)
    if failed:
        print(f"FAILED: {', '.join(failed)} ({len(failed)} of {len(checks)} checks)")
        return 1
    print(f"PASSED: all {len(checks)} checks")
    return 0


def _checks(stream: Stream) -> dict[str, Callable[[Trial], str]]:
    """Those that apply: a state is not always given, and only one algorithm promises LanceDB's order."""
    checks: dict[str, Callable[[Trial], str]] = {}
    if stream.saved is not None:
        checks["state"] = check_state
    if stream.spec.shuffle_algorithm == "lancedb":
        checks["lancedb"] = check_lancedb
    return checks | {"rows": check_rows, "batches": check_batches, "resume": check_resume}


def _trial(stream: Stream, plan: EpochPlan, arguments: Namespace) -> Trial:
    """Every number checked before anything runs."""
    layout = SplitLayout(plan.num_splits)
    size = arguments.global_batch_size
    if size is None:
        size = -(-plan.rows_per_split // _NUM_STEPS) * plan.num_splits
    layout.check_global_batch_size(size)
    # A step that is larger than the epoch is the whole of it.
    size = min(size, plan.num_splits * plan.rows_per_split)
    num_workers = sorted({check_int("--num-workers", number, minimum=1) for number in arguments.num_workers})
    legal = layout.world_sizes(num_workers[0], up_to=_MAX_WORLD_SIZE) or [1]
    world_sizes = arguments.world_sizes or [legal[0], legal[len(legal) // 2], legal[-1]]
    # Each number that is named is run with one of the others at least, or refused: a verdict speaks of no other.
    for world_size in world_sizes:
        layout.check(world_size, num_workers[0])
    for workers in num_workers:
        layout.check(min(world_sizes), workers)
    num_steps = num_batches(plan.num_splits * plan.rows_per_split, size, drop_last=False)
    steps = arguments.steps
    if steps is None:
        steps = [0, 1, num_steps // 2, num_steps - 1, num_steps, *_step_of_state(stream, plan, size)]
    for step in steps:
        if not 0 <= step <= num_steps:
            raise InvalidArgumentError(f"--steps names {step}, but the epoch has {num_steps} steps of {size} rows")
    return Trial(
        stream=stream,
        plan=plan,
        world_sizes=sorted(set(world_sizes)),
        num_workers=num_workers,
        global_batch_size=size,
        num_steps=num_steps,
        steps=sorted(set(steps)),
        lancedb_rows=min(check_int("--lancedb-rows", arguments.lancedb_rows, minimum=1), plan.ids.size),
        ray=arguments.ray,
        strict=not arguments.lenient,
    )


def _step_of_state(stream: Stream, plan: EpochPlan, global_batch_size: int) -> list[int]:
    """The step at which the state stands, if it is one of this epoch."""
    saved = stream.saved
    if saved is None or saved.epoch != stream.epoch or not is_cycle_boundary(saved.position):
        return []
    step, rest = divmod(int(saved.position[0]) * plan.num_splits, global_batch_size)
    inside = saved.position[0] <= plan.rows_per_split
    return [step] if inside and not rest else []


def check_state(trial: Trial) -> str:
    """The state is one of this stream, by the checks of ``load_state_dict``."""
    saved = trial.stream.saved
    assert saved is not None
    check_fit(trial.stream.spec, saved, epoch=saved.epoch, strict=trial.strict)
    return f"fits the table: epoch {saved.epoch}, {show_position(saved)}"


def check_lancedb(trial: Trial) -> str:
    """The plan's rows are those of LanceDB's own dataset, in its order."""
    spec, plan = trial.stream.spec, trial.plan
    table = spec.table.open()
    # (S, L) -> (L, S): cycle by cycle, in each the splits ascending
    expected = plan.ids.T.reshape(-1)[: trial.lancedb_rows]
    try:
        dataset = StreamingDataset(
            table,
            num_splits=plan.num_splits,
            shuffle=spec.shuffle,
            shuffle_seed=spec.shuffle_seed,
            shuffle_clump_size=spec.shuffle_clump_size,
            filter=spec.filter,
            epoch=plan.epoch,
            columns=[ROW_ID],
        )
        # One row more, to see where its epoch ends.
        found = np.fromiter(_row_ids(dataset, len(expected) + 1), dtype=np.uint64)
    except Exception as error:
        message = native_error_text(table, error)
    else:
        message = ""
    if message:
        raise ReadError(f"LanceDB's StreamingDataset cannot read this table: {message}")
    for start in range(0, len(expected), _BATCH):
        stop = min(start + _BATCH, len(expected))
        different = describe_difference(expected[start:stop].tolist(), found[start:stop].tolist())
        assert not different, f"StreamingDataset delivers other rows, from row {start} on: {different}"
    whole = len(expected) == plan.ids.size
    assert len(found) == len(expected) or not whole, f"StreamingDataset goes on after the plan's {len(expected)} rows"
    which = "all" if whole else f"the first {show(len(expected))} of"
    return f"{which} {show(plan.ids.size)} rows of the epoch in the order of StreamingDataset"


def _row_ids(dataset: StreamingDataset, num_rows: int) -> Iterator[int]:
    """The next ``num_rows`` row ids, or as many as there are."""
    rows = iter(dataset)
    try:
        for row in tqdm(itertools.islice(rows, num_rows), "lancedb", num_rows, **_BAR):
            yield row[ROW_ID]
    finally:
        rows.close()  # type: ignore[attr-defined]


def check_rows(trial: Trial) -> str:
    """The pinned version delivers the columns of the stream for the sampled steps."""
    table, columns = trial.stream.spec.table.open(), trial.stream.spec.columns
    steps = sorted({min(step, trial.num_steps - 1) for step in trial.steps})
    count = 0
    for step in tqdm(steps, "rows", **_BAR):
        row_ids = trial.plan.row_ids_of_step(step, trial.global_batch_size)
        count += read_rows(table, row_ids, columns=columns).num_rows
    names = "all columns" if columns is None else ", ".join(columns)
    return f"{show(count)} rows of steps {show(steps)} read: {names}"


def check_batches(trial: Trial) -> str:
    """Every topology reads the same global batches, from the table."""
    backend = _Counted(_backend(trial, read=True), "batches", len(trial.topologies))
    with backend:
        assert_same_batches(backend, **trial.options)
    return (
        f"{show(trial.num_steps)} steps of {show(trial.global_batch_size)} rows are the same on world sizes "
        f"{show(trial.world_sizes)} and with reader workers {show(trial.num_workers)}{trial.left_out}"
    )


def check_resume(trial: Trial) -> str:
    """Saved on any topology after any of the steps, a run goes on exactly on any other."""
    num_pairs = len(trial.topologies) ** 2
    num_runs = len(trial.topologies) + num_pairs * len(trial.steps)
    with _Counted(_backend(trial, read=False), "resume", num_runs) as backend:
        assert_exact_resume(backend, steps=trial.steps, **trial.options)
    return f"exact after steps {show(trial.steps)}, from every world size to every other ({show(num_runs)} runs)"


def _backend(trial: Trial, *, read: bool) -> Backend:
    spec = trial.stream.spec
    if not trial.ray:
        return PlanBackend(spec, read=read)
    from lance_ray_stream.read import read_stream

    dataset = read_stream(
        spec.table,
        num_splits=spec.num_splits,
        shuffle=spec.shuffle,
        shuffle_seed=spec.shuffle_seed,
        shuffle_clump_size=spec.shuffle_clump_size,
        filter=spec.filter,
        columns=[*(name for name in spec.columns or () if name != ROW_ID), ROW_ID],
    )
    return RayBackend(dataset)


class _Counted:
    """A backend that moves a progress bar at every run."""

    def __init__(self, backend: Backend, name: str, num_runs: int) -> None:
        self._backend = backend
        self._bar = tqdm(desc=name, total=num_runs, unit="run", **_BAR)
        self.num_splits = backend.num_splits

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def keys(self, epoch: int) -> list[list[Any]]:
        """As :meth:`Backend.keys`."""
        return self._backend.keys(epoch)

    def run(self, topology: Topology, **options: Any) -> list[RankRun]:
        """As :meth:`Backend.run`."""
        runs = self._backend.run(topology, **options)
        self._bar.update()
        return runs


# On a terminal only, on stderr, and gone when it is done: what stays is the verdict.
_BAR: dict[str, Any] = {"disable": None, "leave": False, "dynamic_ncols": True}


@contextmanager
def _ray_if(wanted: bool) -> Iterator[None]:
    """A Ray to run on: the one there is, that of ``RAY_ADDRESS``, or a local one for as long as this takes."""
    if not wanted:
        yield
        return
    import ray

    ray_data = logging.getLogger("ray.data")
    level = ray_data.level
    ray_data.setLevel(logging.ERROR)
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray_data.setLevel(level)
        if started:
            ray.shutdown()
