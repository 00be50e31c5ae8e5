"""The stream that the arguments name, from flags or from a saved state."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lance_ray_stream.cli.saved import read_state, show_shuffle, show_table
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import (
    InvalidArgumentError,
    NotEnoughRowsError,
    StateError,
    StateMismatchError,
    UnsupportedColumnError,
)
from lance_ray_stream.plan import build_plan
from lance_ray_stream.spec import StreamSpec, make_spec
from lance_ray_stream.state import StreamState
from lance_ray_stream.table import TableRef

# Flags whose values a state knows: always, and if it is one of this package.
_ALWAYS_IN_STATE = ("num_splits", "seed")
_IN_OWN_STATE = ("version", "tag", "no_shuffle", "clump_size", "algorithm", "filter")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What is to be looked at.

    Attributes:
        saved: the state that the stream was described by, if it was.
    """

    spec: StreamSpec
    epoch: int
    saved: StreamState | None

    @property
    def num_splits(self) -> int:
        """The number of splits, which is always decided here."""
        assert self.spec.num_splits is not None
        return self.spec.num_splits

    def facts(self, plan: EpochPlan) -> dict[str, object]:
        """What a plan is the plan of, for reading."""
        spec, ref = self.spec, self.spec.table.identity()
        return {
            "table": show_table(ref),
            "version": str(spec.table.version),
            "filter": spec.filter,
            "shuffle": show_shuffle(spec.shuffle, spec.shuffle_seed, spec.shuffle_clump_size, spec.shuffle_algorithm),
            "epoch": str(plan.epoch),
            "num_splits": plan.num_splits,
            "rows": plan.rows,
            "rows per split": plan.rows_per_split,
            "dropped rows": plan.dropped_rows,
            "fingerprint": plan.fingerprint,
        }

    def record(self, plan: EpochPlan) -> dict[str, object]:
        """The same for programs, by the names that a state uses."""
        spec = self.spec
        return {
            "table": spec.table.identity(),
            "version": spec.table.version,
            "filter": spec.filter,
            "shuffle": spec.shuffle,
            "shuffle_seed": spec.shuffle_seed,
            "shuffle_clump_size": spec.shuffle_clump_size,
            "shuffle_algorithm": spec.shuffle_algorithm,
            "epoch": plan.epoch,
            "num_splits": plan.num_splits,
            "rows": plan.rows,
            "rows_per_split": plan.rows_per_split,
            "dropped_rows": plan.dropped_rows,
            "fingerprint": plan.fingerprint,
        }


def stream_of(arguments: Namespace) -> Stream:
    """The stream of the flags, or of ``--state`` and the flags that it leaves open."""
    saved = None if arguments.state is None else read_state(arguments.state)
    epoch = arguments.epoch if arguments.epoch is not None else 0 if saved is None else saved.epoch
    if saved is None and arguments.num_splits is None:
        raise InvalidArgumentError("name --num-splits, or the --state that knows it")
    fixed = () if saved is None else _ALWAYS_IN_STATE + (_IN_OWN_STATE if saved.provenance is not None else ())
    for name in fixed:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgumentError(f"{flag} is known from --state {arguments.state}; leave it out")
    ref = TableRef(
        arguments.uri,
        arguments.table,
        version=arguments.tag if arguments.version is None else arguments.version,
        storage_options=dict(arguments.storage_options),
    )
    if saved is not None and saved.provenance is not None:
        return Stream(spec=_spec_of_state(ref, saved, columns=arguments.columns), epoch=epoch, saved=saved)
    spec = make_spec(
        ref,
        num_splits=arguments.num_splits if saved is None else saved.num_splits,
        shuffle=not arguments.no_shuffle,
        shuffle_seed=saved.shuffle_seed if saved is not None else arguments.seed or 0,
        shuffle_clump_size=arguments.clump_size,
        columns=arguments.columns,
        filter=arguments.filter,
        shuffle_algorithm=arguments.algorithm or "lancedb",
    )
    return Stream(spec=spec, epoch=epoch, saved=saved)


def plan_of(stream: Stream) -> EpochPlan:
    """The plan of the stream's epoch, the one that the state was saved in if there is one.

    Raises:
        StateMismatchError: if the state is one of another stream; another address of the table only warns.
    """
    if stream.saved is None:
        return build_plan(stream.spec, stream.epoch)
    return check_fit(stream.spec, stream.saved, epoch=stream.epoch, strict=False)


def check_fit(spec: StreamSpec, saved: StreamState, *, epoch: int, strict: bool) -> EpochPlan:
    """The plan of ``epoch``, after the checks that ``load_state_dict`` makes.

    Raises:
        StateMismatchError: if the state is one of another stream, or lies beyond the end of its epoch.
    """
    from lance_ray_stream.provenance import adopt, check_against_plan

    # Which columns are read is no question here: no order depends on it.
    columns = spec.columns if saved.provenance is None else saved.provenance["columns"]
    adopt(replace(spec, columns=None if columns is None else tuple(columns)), saved, strict=strict)
    plan = build_plan(spec, epoch)
    saved_in = plan if epoch == saved.epoch else build_plan(spec, saved.epoch)
    try:
        check_against_plan(saved, saved_in)
    except StateError as error:
        raise StateMismatchError(str(error)) from None
    return plan


def fit_of(
    saved: StreamState, uri: str, table: str, *, storage_options: Mapping[str, str] | None, strict: bool
) -> Stream:
    """The stream that continues ``saved`` on a table.

    Raises:
        StateMismatchError: if the state does not fit the table, with every reason.
        VersionNotFoundError: if the version that the state names is gone.
    """
    ref = TableRef(uri, table, storage_options=storage_options)
    try:
        spec = _spec_of_state(ref, saved, columns=None)
        check_fit(spec, saved, epoch=saved.epoch, strict=strict)
    except (NotEnoughRowsError, InvalidArgumentError, UnsupportedColumnError) as error:
        raise StateMismatchError(f"The state does not fit the table: {error}") from None
    return Stream(spec=spec, epoch=saved.epoch, saved=saved)


def _spec_of_state(ref: TableRef, saved: StreamState, *, columns: list[str] | None) -> StreamSpec:
    """The stream of a state on ``ref``; of a state of LanceDB's own, which does not know the rest, by defaults."""
    known: Mapping[str, Any] = saved.provenance or {}
    if "version" in known:
        ref = ref.with_version(known["version"])
    return make_spec(
        ref,
        num_splits=saved.num_splits,
        shuffle=known.get("shuffle", True),
        shuffle_seed=saved.shuffle_seed,
        shuffle_clump_size=known.get("shuffle_clump_size"),
        columns=known.get("columns") if columns is None else columns,
        filter=known.get("filter"),
        shuffle_algorithm=known.get("shuffle_algorithm", "lancedb"),
    )
