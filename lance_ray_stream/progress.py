"""How far one rank has come in which stream: the cursor, the plan it moves in, and both as a state."""

from __future__ import annotations

import warnings
from typing import Any, Generic, TypeVar

from lance_ray_stream.cursor import Cursor
from lance_ray_stream.epoch_plan import PlannedEpoch
from lance_ray_stream.errors import LayoutError, PlanError
from lance_ray_stream.planner import Planner
from lance_ray_stream.position import ranks_are_even, rows_left, rows_to_deliver
from lance_ray_stream.provenance import Facts, adopt, check_against_plan, describe
from lance_ray_stream.spec import StreamSpec
from lance_ray_stream.state import StreamState, parse_state

# The form of the plans that the planner gives.
PlanT = TypeVar("PlanT", bound=PlannedEpoch)


class Progress(Generic[PlanT]):
    """A rank's place in a stream.

    Args:
        spec: what is streamed, with ``num_splits`` decided.
        cursor: where the rank stands.
        planner: who is asked for an epoch's plan, when something depends on it.
    """

    def __init__(self, spec: StreamSpec, cursor: Cursor, planner: Planner[PlanT]) -> None:
        self.spec = spec
        self.cursor = cursor
        self.planner = planner
        self._plan: PlanT | None = None
        self._filtered_rows: int | None = None  # the same in every epoch
        self._facts = self._facts_of_table()

    @property
    def rows(self) -> int:
        """N: rows of the table that pass the filter."""
        if self.spec.filter is None:
            return self.spec.total_rows
        if self._filtered_rows is None:
            self._filtered_rows = self.plan().rows
        return self._filtered_rows

    @property
    def rows_per_split(self) -> int:
        """L: rows of each split in an epoch."""
        return self.rows // self.cursor.layout.num_splits

    @property
    def rows_left(self) -> int:
        """Rows that every rank still receives in this epoch."""
        return self.cursor.rows_left(self.rows_per_split)

    def plan(self) -> PlanT:
        """The plan of the current epoch, with the rows of this rank's splits."""
        if self._plan is None:
            self._plan = self.planner.plan(self.spec, self.cursor.epoch, self.cursor.splits)
        return self._plan

    def replan(self) -> bool:
        """Ask for the current epoch's plan anew; whether its row ids are in another place now.

        Raises:
            PlanError: if it became another plan.
        """
        before, self._plan = self._plan, None
        plan = self.plan()
        if before is not None and plan.fingerprint != before.fingerprint:
            raise PlanError(
                f"Epoch {self.cursor.epoch} was planned again after the planner's process had died, and became another "
                f"plan: fingerprint {before.fingerprint} before, {plan.fingerprint} now. Is lancedb the same on all "
                "nodes?"
            )
        return plan != before

    def begin_reading(self, plan: PlanT | None = None) -> PlanT:
        """The plan that the rows from here on come from, ``plan`` if it is known; states name it from now on."""
        plan = self._plan = plan or self.plan()
        self._facts = Facts(rows=plan.rows, fingerprint=plan.fingerprint)
        return plan

    def jump(self, epoch: int) -> None:
        """Stand at the first row of ``epoch``."""
        self.cursor.jump(epoch)
        self._plan, self._facts = None, self._facts_of_table()

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON types; asks nobody, so that the last rank alive can still save it."""
        provenance = describe(self.spec, self._facts)
        return self.cursor.save(shuffle_seed=self.spec.shuffle_seed, provenance=provenance).to_dict()

    def load_state_dict(self, state: dict[str, Any], *, strict: bool) -> None:
        """Stand where ``state`` says, after proving that it is a state of this stream."""
        saved = parse_state(state)
        spec = adopt(self.spec, saved, strict=strict)
        plan = self.planner.plan(spec, saved.epoch, self.cursor.splits)
        check_against_plan(saved, plan)
        self._check_even(saved, plan.rows_per_split, strict=strict)
        self.spec, self._filtered_rows = spec, plan.rows
        self.cursor.resume(saved, plan.rows_per_split)
        self._plan, self._facts = None, self._facts_of_table()
        if self.cursor.epoch == saved.epoch:
            self._plan = plan
            if saved.provenance is not None:
                # A state that is loaded and saved at once is the same state.
                known = saved.provenance
                self._facts = Facts(rows=known.get("rows"), fingerprint=known.get("fingerprint"))

    def _check_even(self, saved: StreamState, rows_per_split: int, *, strict: bool) -> None:
        """Refuse, or warn of, a state from which ranks would have unequal rests: all stop at the smallest (G6)."""
        layout, world_size = self.cursor.layout, self.cursor.world_size
        if ranks_are_even(saved.position, world_size):
            return
        text = (
            f"The state was saved inside a cycle: its splits stand at {saved.position.min()} to {saved.position.max()} "
            f"rows, so that the ranks of world_size={world_size} "
        )
        if layout.is_even(world_size):
            left = rows_left(saved.position, rows_per_split)
            lost = left - world_size * rows_to_deliver(saved.position, world_size, rows_per_split)
            text += (
                "have unequally many rows left. All would stop at the smallest rest, and the last "
                f"{lost} of the epoch's {left} rows would not be delivered."
            )
            if not strict:
                warnings.warn(text, stacklevel=4)
                return
            way_out = "load_state_dict(state, strict=False) accepts it. "
        else:
            text += "with their unequally many splits could not go on in step."
            way_out = ""
        fitting = [str(size) for size in layout.world_sizes() if ranks_are_even(saved.position, size)]
        raise LayoutError(
            f"{text} World sizes without this loss: {', '.join(fitting)}. {way_out}A global_batch_size that is a "
            f"multiple of num_splits={layout.num_splits} avoids it for every world size."
        )

    def _facts_of_table(self) -> Facts:
        return Facts(rows=self.spec.total_rows if self.spec.filter is None else None, fingerprint=None)
