"""What a rank iterates over: delivers batches in order, remembers what was received, resumes exactly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
from ray.data import DataContext, Dataset
from ray.data.block import BlockAccessor

from lance_ray_stream.batches import Iteration, StreamBatches, read_on
from lance_ray_stream.cursor import Cursor
from lance_ray_stream.display import facts_html, show_range
from lance_ray_stream.errors import InvalidArgumentError, LayoutError, StreamUsageError
from lance_ray_stream.feed import Feed
from lance_ray_stream.insight import Insight, summarize
from lance_ray_stream.layout import SplitLayout, check_int
from lance_ray_stream.plan import check_epoch
from lance_ray_stream.planner import Planner, PublishedPlan
from lance_ray_stream.position import num_batches
from lance_ray_stream.progress import Progress
from lance_ray_stream.rank_facts import RankFacts
from lance_ray_stream.ray_internals import (
    Execution,
    HookedDataIterator,
    delivery_seconds,
    operator_seconds,
    static_schema,
)
from lance_ray_stream.reading import Reader
from lance_ray_stream.transforms import stream_of

# Rows that iter_rows() fetches at a time.
_ROWS_AT_ONCE = 1_024


class StreamIterator(RankFacts, HookedDataIterator):
    """One rank's part of a stream: a ``ray.data.DataIterator`` with a position.

    Made by :class:`StreamDataConfig`; get it in the training function with
    ``ray.train.get_dataset_shard(name)`` or :func:`get_stream`.

    An iteration delivers what is left of the current epoch. When it finishes, the stream stands at the start of
    the next epoch; after a ``break`` it stands where the trainer stopped, and the next iteration goes on
    from there. Only one iteration is live at a time: a new one ends the one before.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        name: str,
        layout: SplitLayout,
        rank: int,
        world_size: int,
        planner: Planner[PublishedPlan],
        global_batch_size: int | None = None,
        progress: bool = False,
    ) -> None:
        source = stream_of(feed.dataset)
        self._cursor = Cursor(layout, rank=rank, world_size=world_size, epoch=source.epoch)
        self._progress = Progress(replace(source.spec, num_splits=layout.num_splits), self._cursor, planner)
        self._global_batch_size = global_batch_size
        self._feed = feed
        self._reader = Reader(feed, self._progress)
        self._name = name
        self._live: weakref.ref[Iteration] | None = None
        self._running: Dataset | None = None
        self._count_batches = True
        self._insight = Insight(name, rank, progress=progress)

    def __repr__(self) -> str:
        own = self._cursor.position()[self.splits.start : self.splits.stop]
        return (
            f"StreamIterator({self._name!r}, rank={self.rank}/{self.world_size}, "
            f"splits={self.splits.start}..{self.splits.stop - 1} of {self.num_splits}, "
            f"epoch={self.epoch}, rows_received={int(own.sum())})"
        )

    def _repr_html_(self) -> str:
        position = self._cursor.position()
        facts = {
            "rank": f"{self.rank} of {self.world_size}",
            "splits": f"{show_range(self.splits)} of {self.num_splits}",
            "epoch": self.epoch,
            "rows received in this epoch": int(position[self.splits.start : self.splits.stop].sum()),
            "rows received on all ranks": int(position.sum()),
        }
        return facts_html(f"StreamIterator {self._name!r}", facts)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_live": None, "_running": None}

    # --- position and state ----------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Stand at the first row of ``epoch``; keeps the position if the stream is in that epoch already."""
        epoch = check_epoch(self._progress.spec, epoch)
        if epoch != self.epoch:
            self._refuse_while_live("set_epoch to another epoch")
            self._progress.jump(epoch)

    def state_dict(self) -> dict[str, Any]:
        """What was received so far, as a small JSON object; see docs/checkpoints.md.

        Needs no other rank. Every rank's state is the global one as long as ranks are in step.
        """
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Continue at the row after the last one that ``state`` counts, on this rank and world size.

        Args:
            state: from ``state_dict()`` or ``merge_state_dicts()``, or from LanceDB's
                ``StreamingDataset``.
            strict: if False, what cannot change the order of rows is warned about instead of refused: where the
                table is found, which columns are read, and a position inside a cycle that leaves the ranks
                unequally many rows (the last rows of the epoch are then not delivered).

        Raises:
            StateError: if the state is malformed.
            StateMismatchError: if it belongs to another stream, listing every difference.
            VersionNotFoundError: if the table's version that it names no longer exists.
            LayoutError: if it was saved inside a cycle and the ranks of this world size would have unequal rests.
            StreamUsageError: if an iteration is live.
        """
        self._refuse_while_live("load a state")
        self._progress.load_state_dict(state, strict=strict)

    # --- iteration -----------------------------------------------------------------------------

    def iter_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        prefetch_batches: int = 1,
        batch_format: str | None = "default",
        drop_last: bool = False,
        **local_shuffle: Any,
    ) -> StreamBatches:
        """As ``DataIterator.iter_batches``, with ``global_batch_size`` in place of ``batch_size``."""
        batches = super().iter_batches(
            batch_size=self.batch_rows(global_batch_size, batch_size),
            prefetch_batches=prefetch_batches,
            batch_format=batch_format,
            drop_last=drop_last,
            **local_shuffle,
        )
        return cast(StreamBatches, batches)

    def iter_torch_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Any = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        **local_shuffle: Any,
    ) -> StreamBatches:
        """As ``DataIterator.iter_torch_batches``, with ``global_batch_size`` in place of ``batch_size``.

        Without a ``collate_fn``, columns become tensors by :class:`TensorCollate`.

        Raises:
            UnsupportedColumnError: if a column cannot become a tensor and no ``collate_fn`` is given.
            LayoutError: if the batch size does not fit the layout.
        """
        # Only now: the processes that plan and deal out iterators never need torch.
        from lance_ray_stream.collate import TensorCollate

        if collate_fn is None:
            collate_fn, dtypes = TensorCollate(dtypes), None
            schema = static_schema(self._feed.dataset)
            if isinstance(schema, pa.Schema):
                collate_fn.check(schema)
        batches = super().iter_torch_batches(
            batch_size=self.batch_rows(global_batch_size, batch_size),
            prefetch_batches=prefetch_batches,
            dtypes=dtypes,
            device=device,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory,
            **local_shuffle,
        )
        return cast(StreamBatches, batches)

    def iter_tf_batches(
        self, *, global_batch_size: int | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Iterable[Any]:
        """As ``DataIterator.iter_tf_batches``, with ``global_batch_size`` in place of ``batch_size``."""
        return super().iter_tf_batches(batch_size=self.batch_rows(global_batch_size, batch_size), **kwargs)

    def iter_jax_batches(
        self, *, global_batch_size: int | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Iterable[Any]:
        """As ``DataIterator.iter_jax_batches``, with ``global_batch_size`` in place of ``batch_size``."""
        return super().iter_jax_batches(batch_size=self.batch_rows(global_batch_size, batch_size), **kwargs)

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """As ``DataIterator.iter_rows``; the position moves with every row."""
        self.check_equal_groups("iter_rows()")
        for batch in self._batches(count_batches=False, batch_size=_ROWS_AT_ONCE, batch_format="pyarrow"):
            rows: Iterator[dict[str, Any]] = BlockAccessor.for_block(batch).iter_rows(public_row_format=True)
            for row in rows:
                self._insight.meter.rows += 1
                self._cursor.receive(1)
                yield row

    def _batches(
        self,
        *,
        count_batches: bool,
        batch_size: int | None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        **kwargs: Any,
    ) -> StreamBatches:
        if local_shuffle_buffer_size is not None or local_shuffle_seed is not None:
            raise InvalidArgumentError(
                "local_shuffle_buffer_size and local_shuffle_seed would change the order that every rank and every "
                "resume relies on. read_stream(shuffle=True, shuffle_seed=...) shuffles the whole table already."
            )
        size = check_int("batch_size", batch_size, minimum=1)
        if not isinstance(drop_last, bool):
            raise InvalidArgumentError(f"drop_last must be True or False, got {drop_last!r}.")
        if drop_last and size > self.rows_per_epoch:
            raise LayoutError(
                f"batch_size={size} with drop_last=True gives an epoch of zero steps: a rank has "
                f"{self.rows_per_epoch} rows per epoch. Use at most that, or drop_last=False."
            )
        batches = self.ray_batches(
            batch_size=size,
            drop_last=drop_last,
            prefetch_batches=check_int("prefetch_batches", prefetch_batches, minimum=0),
            **kwargs,
        )

        def start() -> Iterable[Any]:
            self._count_batches = count_batches
            return batches

        return StreamBatches(
            lambda: num_batches(self._progress.rows_left, size, drop_last), lambda: self._run(size, drop_last, start)
        )

    def _run(self, batch_size: int, drop_last: bool, start: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """One iteration, ending the one before it."""
        before = None if self._live is None else self._live()
        if before is not None:
            before.end_for_another()  # also one that has not begun: it would begin in the middle of this one
        iteration = Iteration(self._deliver(batch_size, drop_last, start), self._name)
        self._live = weakref.ref(iteration)
        return iteration

    def _deliver(
        self, batch_size: int, drop_last: bool, start: Callable[[], Iterable[Any]]
    ) -> Generator[Any, None, None]:
        self._cursor.settle()
        epoch, due = self.epoch, self._progress.rows_left
        try:
            if due >= batch_size or (due and not drop_last):
                of_epoch, left = (num_batches(rows, batch_size, drop_last) for rows in (self.rows_per_epoch, due))
                wait_no_longer = self._reader.wait_no_longer
                read = read_on(start, replan=self._progress.replan, wait_no_longer=wait_no_longer, name=self._name)
                yield from self._insight.observe(read, epoch=epoch, first_step=of_epoch - left + 1, num_steps=of_epoch)
            expected = due - due % batch_size if drop_last else due
            if (self.epoch, self._cursor.received) != (epoch, expected):
                raise StreamUsageError(
                    f"Epoch {epoch} delivered {self._cursor.received} rows to rank {self.rank} instead of {expected}: "
                    "an operator lost or added rows. Please report this with the dataset's operators."
                )
        except BaseException:
            self._reader.end(finished=False)
            raise
        self._progress.jump(epoch + 1)
        self._reader.end(finished=True)

    def _refuse_while_live(self, what: str) -> None:
        iteration = None if self._live is None else self._live()
        if iteration is not None and iteration.is_live:
            raise StreamUsageError(
                f"Cannot {what} while an iteration of {self._name!r} is live. Leave the loop first (break, or "
                "close() the iterator that you hold)."
            )

    # --- Ray Data's side -----------------------------------------------------------------------

    def execution_to_read(self) -> Execution:
        """What is left of the epoch for this rank."""
        execution = self._reader.begin()
        self._running = execution.dataset
        return execution

    def on_block(self, num_rows: int, num_bytes: int) -> None:
        """A block has arrived."""
        self._insight.meter.bytes += num_bytes
        self._reader.on_rows(num_rows)

    def on_receive(self, num_rows: int) -> None:
        """The trainer is about to get a batch; ``iter_rows`` counts its rows itself."""
        if self._count_batches:
            self._insight.meter.rows += num_rows
            self._cursor.receive(num_rows)

    def make_batches(self, **kwargs: Any) -> StreamBatches:
        """Every ``iter_*`` of ``DataIterator`` comes through here."""
        return self._batches(count_batches=True, **kwargs)

    def metric_tags(self) -> dict[str, str | None]:
        """The labels of this rank's metrics."""
        return {"dataset": self._name, "split_index": str(self.rank)}

    def schema(self) -> Any:
        """The schema of the batches' rows."""
        return self._feed.dataset.schema()

    def stats(self) -> str:
        """Rows, bytes and times of the latest iteration, and below them Ray Data's own account of it."""
        if self._running is None:
            return f"{self!r}: nothing has been read yet"
        summary = summarize(
            self._insight.meter,
            table_rows=self.table_rows,
            rows=self.rows,
            num_splits=self.num_splits,
            task_seconds=operator_seconds(self._running),
            delivery_seconds=delivery_seconds(self._running),
        )
        return f"{self!r}\n{summary}\n\n{self._running.stats()}"

    def get_context(self) -> DataContext:
        """The Ray Data context of the iterations: the dataset's own, in order."""
        return (self._running or self._feed.dataset).context
