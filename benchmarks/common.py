"""What the benchmarks share: tables, clocks, memory of a process tree, a Ray to measure in, tables of results.

Machines differ and are shared, so a benchmark compares: all contenders run in turn, several times over, and what
counts is the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa

# Processes that Ray starts are exec'ed at once: nothing of lancedb lives on in them.
warnings.filterwarnings("ignore", message="lancedb fork support")

MIB = 2**20
TABLE = "rows"
_ROWS_PER_ADD = 50_000


# --- data ------------------------------------------------------------------------------------------------


def make_table(directory: str, *, rows: int, row_bytes: int, kind: str = "list", seed: int = 0) -> str:
    """Write a LanceDB table of random rows into ``directory``, in fragments of 50,000, and return its uri.

    ``kind``: ``"list"`` for a column ``x`` of fixed-size lists of uint8, ``"binary"`` for binaries.
    Every row has its number in ``id``.
    """
    generator = np.random.default_rng(seed)
    database = lancedb.connect(directory)
    table = None
    for start in range(0, rows, min(_ROWS_PER_ADD, max(1, 256 * MIB // row_bytes))):
        count = min(rows - start, _ROWS_PER_ADD, max(1, 256 * MIB // row_bytes))
        data = pa.table({"id": np.arange(start, start + count), "x": _payload(generator, count, row_bytes, kind)})
        if table is None:
            table = database.create_table(TABLE, data)
        else:
            table.add(data)
    return directory


def _payload(generator: np.random.Generator, count: int, row_bytes: int, kind: str) -> pa.Array:
    values = generator.integers(0, 256, count * row_bytes, dtype=np.uint8)
    if kind == "list":
        return pa.FixedSizeListArray.from_arrays(pa.array(values), row_bytes)
    offsets = np.arange(count + 1, dtype=np.int32) * row_bytes
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(values)])


def open_table(uri: str) -> Any:
    """The table that :func:`make_table` wrote."""
    return lancedb.connect(uri).open_table(TABLE)


@contextmanager
def scratch() -> Iterator[str]:
    """A directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="lance_ray_stream_bench_", ignore_cleanup_errors=True) as directory:
        yield directory


# --- where contenders run --------------------------------------------------------------------------------


@contextmanager
def local_ray(num_cpus: int, object_store_mib: int = 1024) -> Iterator[None]:
    """A Ray of this process's own, with ``num_cpus`` CPUs for reading."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # a busy machine
    # Ray runs its workers at nice 15: on a busy machine they would lose to the contenders outside of Ray.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        object_store_memory=object_store_mib * MIB,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def processes(count: int) -> Iterator[Any]:
    """Fresh Python processes, without Ray, in which contenders run by ``pool.apply`` or ``pool.map``."""
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        yield pool


# --- clocks ----------------------------------------------------------------------------------------------


def rows_per_s(batches: Iterable[Any], count: Callable[[Any], int], *, limit_s: float = float("inf")) -> float:
    """Rows per second over ``batches``, from the call to the last of them, or for about ``limit_s``."""
    start, rows = time.perf_counter(), 0
    for batch in batches:
        rows += count(batch)
        if time.perf_counter() - start > limit_s:
            break
    return rows / (time.perf_counter() - start)


def seconds(function: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@dataclass
class Results:
    """Measurements by contender, in turns: ``values[name][turn]``."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """One measurement of a contender, in this turn."""
        self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """The median over the turns."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, other: str) -> float:
        """The median over the turns of the ratio of two contenders in one turn."""
        pairs = zip(self.values[name], self.values[other], strict=True)
        return statistics.median(value / reference for value, reference in pairs)

    def spread(self, name: str) -> str:
        """The lowest and the highest value of a contender."""
        return f"{short(min(self.values[name]))}..{short(max(self.values[name]))}"


def run_turns(contenders: dict[str, Callable[[], float]], repeats: int) -> Results:
    """Every contender once per turn, in order; ``repeats`` turns."""
    results = Results()
    for turn in range(repeats):
        for name, measure in contenders.items():
            results.add(name, measure())
            print(f"  turn {turn + 1}/{repeats}  {name}: {short(results.values[name][-1])}", flush=True)
    return results


# --- memory ----------------------------------------------------------------------------------------------


def tree_pss_mib(pid: int | None = None) -> float:
    """Proportional set size of a process and its descendants, in MiB: shared pages count once (Linux)."""
    total, waiting = 0, [pid or os.getpid()]
    while waiting:
        process = waiting.pop()
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            for task in Path(f"/proc/{process}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, StopIteration):
            continue  # it has ended
    return total / 1024


class PeakMemory:
    """The highest :func:`tree_pss_mib` of this process while the context is open, looked at every ``interval_s``."""

    def __init__(self, interval_s: float = 0.25) -> None:
        self.mib = 0.0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.mib = tree_pss_mib()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.mib = max(self.mib, tree_pss_mib())


def peak_rss_mib() -> float:
    """The highest resident set size that this process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- text ------------------------------------------------------------------------------------------------


def machine() -> str:
    """Processor, memory, system and the versions that matter, in one line."""
    model = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {_version(name)}" for name in ("ray", "lancedb", "torch", "pyarrow"))
    return (
        f"{os.cpu_count()} CPUs ({model}), {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {packages}; load before the run {os.getloadavg()[0]:.1f}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def short(value: float) -> str:
    """A number with about three digits: ``1,230``, ``12.3``, ``0.123``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A Markdown table with aligned columns."""
    cells = [[short(cell) if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    print(f"\n### {title}\n")
    for line in [list(header), ["-" * width for width in widths], *cells]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    print(flush=True)


def parser(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """A parser with one integer option per default; ``--row-bytes`` for ``row_bytes``."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in defaults.items():
        result.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=_HELP.get(name, name))
    return result


_HELP = {
    "rows": "rows of the table",
    "row_bytes": "payload bytes of a row",
    "splits": "num_splits of the stream",
    "batch": "rows of a batch",
    "repeats": "turns; medians are over them",
    "epochs": "epochs of a turn, one after the other",
    "step_ms": "milliseconds that the trainer is busy with each batch",
    "cpus": "CPUs that the feed may use",
    "window_rows": "rows of the widest window; 0 for the feed's own",
    "object_store_mib": "size of Ray's object store",
}
