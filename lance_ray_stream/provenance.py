"""The proof in a state: what a stream says of itself, and whether a saved state is one of it."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lance_ray_stream.epoch_plan import PlannedEpoch
from lance_ray_stream.errors import StateError
from lance_ray_stream.spec import StreamSpec, repin
from lance_ray_stream.state import LENIENT_FIELDS, StreamState, differences, refuse

_PACKAGES = ("lance_ray_stream", "lancedb", "ray")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What only a plan tells of an epoch; None where it has not been built or loaded yet.

    Attributes:
        rows: N, rows after the filter.
        fingerprint: of the epoch's plan.
    """

    rows: int | None
    fingerprint: str | None


def describe(spec: StreamSpec, facts: Facts) -> dict[str, Any]:
    """The ``lance_ray_stream`` part of a state, as JSON types, without secrets."""
    return {
        "table": spec.table.identity(),
        "version": spec.table.version,
        "filter": spec.filter,
        "columns": None if spec.columns is None else list(spec.columns),
        "shuffle": spec.shuffle,
        "shuffle_clump_size": spec.shuffle_clump_size,
        "shuffle_algorithm": spec.shuffle_algorithm,
        "rows": facts.rows,
        "fingerprint": facts.fingerprint,
        "packages": _package_versions(),
    }


def adopt(spec: StreamSpec, saved: StreamState, *, strict: bool) -> StreamSpec:
    """The stream that continues ``saved``: ``spec``, on its version and seed where those were left open.

    Raises:
        StateMismatchError: if the state belongs to another stream, listing every difference.
        VersionNotFoundError: if the version that the state names no longer exists.
    """
    if not spec.seed_given:
        spec = replace(spec, shuffle_seed=saved.shuffle_seed)
    if saved.provenance is None:
        warnings.warn(
            "The state has no 'lance_ray_stream' part, so it is one of LanceDB's StreamingDataset: num_splits and "
            "shuffle_seed are checked, but not that its table, version and filter are those of this stream.",
            stacklevel=4,
        )
        refuse(differences(saved.identity(), _identity(spec)))
        return spec
    named = saved.provenance.get("version")
    same_table = saved.provenance.get("table") == spec.table.identity()
    if named != spec.table.version and not spec.version_given and same_table and isinstance(named, int):
        spec = repin(spec, named)
    found = differences(saved.identity(), _identity(spec))
    # A filter's rows and any fingerprint are known from the plan only: check_against_plan compares them.
    found.pop("fingerprint", None)
    if not strict:
        for name in LENIENT_FIELDS.intersection(found):
            warnings.warn(f"The state differs in {name}: {found.pop(name)}.", stacklevel=4)
    refuse(found)
    return spec


def check_against_plan(saved: StreamState, plan: PlannedEpoch) -> None:
    """Whether ``saved`` is a position in ``plan``.

    Raises:
        StateMismatchError: if the plan orders the rows differently, as another release of lancedb may.
        StateError: if the position lies beyond the end of the epoch.
    """
    if saved.provenance is not None:
        found = differences(saved.identity(), {"rows": plan.rows, "fingerprint": plan.fingerprint})
        if "fingerprint" in found:
            before, now = saved.provenance.get("packages"), _package_versions()
            found["fingerprint"] += f" for epoch {saved.epoch} (packages then {before}, now {now})"
        refuse(found)
    beyond = (saved.position > plan.rows_per_split).nonzero()[0].tolist()
    if beyond:
        raise StateError(
            f"The state has received more rows of splits {beyond[:8]} than the {plan.rows_per_split} that a split of "
            f"epoch {saved.epoch} has: it belongs to another table, version or filter."
        )


def _identity(spec: StreamSpec) -> dict[str, Any]:
    rows = spec.total_rows if spec.filter is None else None
    known = describe(spec, Facts(rows=rows, fingerprint=None))
    if rows is None:
        del known["rows"]
    return known | {"num_splits": spec.num_splits, "shuffle_seed": spec.shuffle_seed}


@functools.cache
def _package_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return versions
