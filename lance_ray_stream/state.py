"""What a checkpoint holds: the position in an epoch, and the proof of which stream it is a position in.

The dictionary is a superset of ``lancedb.streaming.StreamingDataset.state_dict()``, so that each side loads
the other's. It is plain JSON: no pickle, no payload, no secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lance_ray_stream.errors import InvalidArgumentError, StateError, StateMismatchError
from lance_ray_stream.layout import IntArray, check_int

PROVENANCE = "lance_ray_stream"
FORMAT = 1

# What must be the same for a position to mean the same rows. The order is that of the error text.
IDENTITY_FIELDS = (
    "table",
    "version",
    "filter",
    "columns",
    "num_splits",
    "shuffle",
    "shuffle_seed",
    "shuffle_clump_size",
    "shuffle_algorithm",
    "rows",
    "fingerprint",
)
# Fields that only a plan tells: None in a state that was saved before there was one.
PLANNED_FIELDS = frozenset({"rows", "fingerprint"})
# Fields that say nothing about the order of the rows: where the table is found and which columns are read.
LENIENT_FIELDS = frozenset({"table", "columns"})
# Fields of LanceDB's own part of a state.
_OUTER_FIELDS = frozenset({"num_splits", "shuffle_seed"})
_MAX_ROWS = 2**62


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """One parsed state.

    Attributes:
        epoch: the epoch in which the position is.
        position: int64, shape (num_splits,): rows received of each split.
        splits: the splits whose position the saver vouches for: inside a cycle those that it counted
            itself; the others were projected, which is exact as long as the ranks are in step.
        provenance: identity of the stream, or None for a state of LanceDB's own.
    """

    num_splits: int
    shuffle_seed: int
    epoch: int
    position: IntArray
    splits: range
    provenance: Mapping[str, Any] | None

    def identity(self) -> dict[str, Any]:
        """The fields that :func:`differences` compares; empty for a state without provenance."""
        fields = {"num_splits": self.num_splits, "shuffle_seed": self.shuffle_seed}
        known = self.provenance or {}
        return fields | {name: known[name] for name in IDENTITY_FIELDS if name in known}

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON types; a new object that the caller may keep and change."""
        consumed = self.position.tolist()
        state: dict[str, Any] = {
            "shuffle_seed": self.shuffle_seed,
            "num_splits": self.num_splits,
            "epoch": self.epoch,
            "samples_consumed_per_split": consumed,
            "positions_consumed_per_split": consumed.copy(),
        }
        if self.provenance is not None:
            state[PROVENANCE] = {"format": FORMAT, **_copied(self.provenance)}
            if self.splits != range(self.num_splits):
                state[PROVENANCE]["splits"] = [self.splits.start, self.splits.stop]
        return state


def _copied(value: Any) -> Any:
    """A copy of JSON types; ``copy.deepcopy`` takes longer than all the rest of a state."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def parse_state(state: object) -> StreamState:
    """Check the form of a state and read it.

    Raises:
        StateError: naming the key that is missing or malformed, or the feature that has no place here.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"A state is a dictionary as state_dict() returns it, got {type(state).__name__}.")
    if "pack_buffers" in state:
        raise StateError("The state is one of packed sequences (pack_sequences=...), which this stream has not.")
    try:
        num_splits = check_int("num_splits", _required(state, "num_splits"), minimum=1)
        shuffle_seed = check_int("shuffle_seed", _required(state, "shuffle_seed"), minimum=0, maximum=2**64 - 1)
        epoch = check_int("epoch", _required(state, "epoch"), minimum=0)
    except InvalidArgumentError as error:
        raise StateError(f"Malformed state: {error}") from None
    samples = _per_split(state, "samples_consumed_per_split", num_splits)
    if state.get("positions_consumed_per_split") is not None:
        position = _per_split(state, "positions_consumed_per_split", num_splits)
        if not np.array_equal(position, samples):
            raise StateError(
                "The state counts rows that a transform skipped (positions_consumed_per_split differs from "
                "samples_consumed_per_split). A stream here delivers every row, so it cannot continue at the "
                "same batch. Finish the epoch where the state was made."
            )
    provenance = state.get(PROVENANCE)
    splits = range(num_splits)
    if provenance is not None:
        splits = _check_provenance(provenance, num_splits)
        provenance = {key: value for key, value in provenance.items() if key not in ("format", "splits")}
    return StreamState(
        num_splits=num_splits,
        shuffle_seed=shuffle_seed,
        epoch=epoch,
        position=samples,
        splits=splits,
        provenance=provenance,
    )


def _required(state: Mapping[str, Any], key: str) -> Any:
    if key not in state:
        raise StateError(f"The state has no {key!r}; it has {sorted(map(str, state))}.")
    return state[key]


def _per_split(state: Mapping[str, Any], key: str, num_splits: int) -> IntArray:
    value = _required(state, key)
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value] * num_splits  # LanceDB's first states hold one number for all splits
    try:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InvalidArgumentError(f"{key} must be a list, got {type(value).__name__}.")
        counts = [check_int(f"{key}[{split}]", count, minimum=0) for split, count in enumerate(value)]
        if max(counts, default=0) > _MAX_ROWS:
            raise InvalidArgumentError(f"{key} counts {max(counts)} rows, more than any table has.")
    except InvalidArgumentError as error:
        raise StateError(f"Malformed state: {error}") from None
    if len(counts) != num_splits:
        raise StateError(f"{key} has {len(counts)} entries for num_splits={num_splits}.")
    return np.asarray(counts, dtype=np.int64)


def _is_count(value: object, minimum: int) -> bool:
    return type(value) is int and minimum <= value <= _MAX_ROWS


def _are_texts(values: object) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, str) for value in values)


def _is_table(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(value.get(key), str) for key in ("uri", "name"))
        and _are_texts(value.get("namespace_path", []))
    )


# The form of each field of the provenance, and how to say it.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "table": (_is_table, "a uri, a name and a namespace_path"),
    "version": (lambda value: _is_count(value, 1), "the version number of a table"),
    "filter": (lambda value: value is None or isinstance(value, str), "an SQL condition or null"),
    "columns": (lambda value: value is None or _are_texts(value), "a list of names or null"),
    "shuffle": (lambda value: isinstance(value, bool), "true or false"),
    "shuffle_clump_size": (lambda value: value is None or _is_count(value, 1), "a number of rows or null"),
    "shuffle_algorithm": (lambda value: isinstance(value, str), "a name"),
    "rows": (lambda value: value is None or _is_count(value, 0), "a number of rows or null"),
    "fingerprint": (lambda value: value is None or isinstance(value, str), "a text or null"),
    "packages": (
        lambda value: isinstance(value, Mapping) and _are_texts([*value, *value.values()]),
        "names and versions",
    ),
}


def _check_provenance(provenance: object, num_splits: int) -> range:
    if not isinstance(provenance, Mapping):
        raise StateError(f"The state's {PROVENANCE!r} part must be a dictionary, got {provenance!r}.")
    if provenance.get("format") != FORMAT:
        raise StateError(
            f"The state has format {provenance.get('format')!r}; this release reads format {FORMAT}. "
            "Load it with the release of lance_ray_stream that wrote it."
        )
    missing = [name for name in IDENTITY_FIELDS if name not in provenance and name not in _OUTER_FIELDS]
    if missing:
        raise StateError(f"The state's {PROVENANCE!r} part has no {', '.join(missing)}: it was changed.")
    for name, (is_well_formed, form) in _FORMS.items():
        if name in provenance and not is_well_formed(provenance[name]):
            raise StateError(f"Malformed state: {name} must be {form}, got {str(provenance[name])[:100]!r}.")
    splits = provenance.get("splits", [0, num_splits])
    whole = isinstance(splits, (list, tuple)) and len(splits) == 2 and all(type(s) is int for s in splits)
    if not whole or not 0 <= splits[0] < splits[1] <= num_splits:
        raise StateError(f"The state's 'splits' must be [start, stop] within num_splits={num_splits}, got {splits!r}.")
    return range(*splits)


def differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], *, sides: tuple[str, str] = ("checkpoint", "this stream")
) -> dict[str, str]:
    """Field by field, what a saved identity and the present one disagree on.

    A field that either side does not know (absent, or None before there was a plan) is not compared.

    Returns:
        field name -> "checkpoint has X, this stream has Y", under the names of ``sides``.
    """
    found = {}
    for name in IDENTITY_FIELDS:
        if name not in saved or name not in present:
            continue
        mine, theirs = present[name], saved[name]
        if name in PLANNED_FIELDS and (mine is None or theirs is None):
            continue
        if mine != theirs:
            found[name] = f"{sides[0]} has {theirs!r}, {sides[1]} has {mine!r}"
    return found


def refuse(found: Mapping[str, str]) -> None:
    """Raise a ``StateMismatchError`` that lists ``found``, if there is anything in it."""
    if not found:
        return
    lines = "\n".join(f"  {name}: {text}" for name, text in found.items())
    lenient = sorted(LENIENT_FIELDS.intersection(found))
    way_out = "Make the stream with the checkpoint's values, or start a new run without it."
    if lenient and len(lenient) == len(found):
        way_out += f" {' and '.join(lenient)} cannot change the order: load_state_dict(state, strict=False) accepts it."
    raise StateMismatchError(f"The state belongs to another stream:\n{lines}\n{way_out}")


def merge_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One exact state from the states of all ranks, saved at the same step.

    Needed only when ranks stopped inside a cycle; at a cycle boundary any rank's state is the global one
    already. Pass every rank the same merged state, on any legal world size.

    Args:
        states: the ``state_dict()`` of every rank of one run, in any order. States of LanceDB's own
            ``StreamingDataset`` merge too, by LanceDB's rule (the elementwise maximum).

    Raises:
        StateError: if there are no states, if they belong to different runs or epochs (every
            difference is listed), if they were not saved at the same step, or if the states of some
            splits' ranks are missing.
    """
    if isinstance(states, (Mapping, str)) or not isinstance(states, Sequence) or not states:
        raise StateError("merge_state_dicts needs a list with the state of every rank.")
    parsed = [parse_state(state) for state in states]
    first = parsed[0]
    for number, other in enumerate(parsed[1:], start=1):
        found = differences(first.identity(), other.identity(), sides=("the first", "the second"))
        if other.epoch != first.epoch:
            found["epoch"] = f"{first.epoch} and {other.epoch}"
        if (other.provenance is None) != (first.provenance is None):
            found[PROVENANCE] = "one of them has this part, the other has not"
        if found:
            lines = "\n".join(f"  {name}: {text}" for name, text in found.items())
            raise StateError(f"State 0 and state {number} are not of the same run and epoch:\n{lines}")
    if first.provenance is None:
        position = np.max([state.position for state in parsed], axis=0)
    else:
        position = _merge_counted(parsed)
    return StreamState(
        num_splits=first.num_splits,
        shuffle_seed=first.shuffle_seed,
        epoch=first.epoch,
        position=position,
        splits=range(first.num_splits),
        provenance=_most_known(parsed),
    ).to_dict()


def _most_known(states: list[StreamState]) -> Mapping[str, Any] | None:
    """The provenance that knows most of the plan: a rank that has read nothing yet does not know it."""
    parts = [state.provenance for state in states if state.provenance is not None]
    return max(parts, key=lambda part: sum(part[name] is not None for name in PLANNED_FIELDS), default=None)


def _merge_counted(states: list[StreamState]) -> IntArray:
    """Each split's position from the rank that counted it."""
    position = np.full(states[0].num_splits, -1, dtype=np.int64)
    for state in states:
        own = slice(state.splits.start, state.splits.stop)
        apart = (position[own] >= 0) & (position[own] != state.position[own])
        if apart.any():
            split = state.splits[int(apart.argmax())]
            raise StateError(
                "The states were not saved at the same step: one has received "
                f"{position[split]} rows of split {split}, another {state.position[split]}. Collect "
                "state_dict() from every rank after the same step."
            )
        position[own] = state.position[own]
    missing = np.flatnonzero(position < 0).tolist()
    if missing:
        raise StateError(
            f"No state comes from the rank of splits {missing}. Collect state_dict() from every rank of the run."
        )
    # What each rank counted is what the others, in step with it, projected.
    if any(not np.array_equal(state.position, position) for state in states):
        raise StateError(
            "The states were not saved at the same step: the ranks have received unequally many rows. Collect "
            "state_dict() from every rank after the same step."
        )
    return position
