"""``protect_version``: for the time of a run, LanceDB's clean-up leaves the versions alone that it reads."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ray.data import Dataset

from lance_ray_stream.errors import InvalidArgumentError, ProtectionError, StateError, TableNotFoundError
from lance_ray_stream.state import parse_state
from lance_ray_stream.table import TableRef
from lance_ray_stream.tags import ProtectedVersion, check_run_name, protect, protected_versions, release
from lance_ray_stream.transforms import contains_stream, stream_of

logger = logging.getLogger(__name__)


@contextmanager
def protect_version(
    datasets: Dataset | Mapping[str, Any],
    name: str | None = None,
    *,
    state: Mapping[str, Any] | Iterable[Mapping[str, Any]] = (),
    keep_on_error: bool = False,
) -> Iterator[str]:
    """Protect the versions that a run reads from LanceDB's clean-up: ``with protect_version(ds): trainer.fit()``.

    Each version gets a tag of the table, which is removed at the end of the block. A process that is killed leaves it
    behind. The next run under the same ``name`` takes over what was left, and removes it when it ends; any other one
    logs a warning that names it, and :func:`unprotect_version` removes it. Only a clean-up that begins later sees
    a tag. While one protects an old version, LanceDB's ``optimize`` raises an error in place of removing versions.

    Args:
        datasets: of ``read_stream``, or the ``datasets`` of a trainer; those that are not streams are left out.
        name: of the run, such as that of its ``RunConfig``; no two runs that read a table at the same time may share
            it. None: the present time and a few random letters.
        state: the state that the training function is going to load, or several. The version that it names is
            protected too: the stream goes on there, although its table may have a newer one.
        keep_on_error: keep the protection where the block ends with an error, for a run that will be started again
            under its name.

    Yields:
        The name of the run.

    Raises:
        InvalidArgumentError: if there is no stream, or the name cannot be part of a tag.
        ProtectionError: if a tag cannot be written, such as with credentials that may only read.
        StateError: if ``state`` is none, names no version, or is one of another table.
        TableNotFoundError, VersionNotFoundError: if a table or a version does not exist.
    """
    name = _new_name() if name is None else check_run_name(name)
    tables = _versions_of(datasets, state)
    left = [(refs[0], kept) for refs in tables for kept in _left_behind(refs[0], name)]
    with ExitStack() as held:
        for refs in tables:
            for ref in refs:
                kept = protect(ref, name)
                if (refs[0], kept) not in left:
                    held.callback(_release, ref, kept)
        # Last, so that a run which cannot start leaves alone what an earlier one left behind.
        for ref, kept in left:
            held.callback(_release, ref, kept)
        try:
            yield name
        except BaseException:
            if keep_on_error:
                held.pop_all()
            raise


def _new_name() -> str:
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)


def _versions_of(datasets: object, state: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[list[TableRef]]:
    """The pinned references of all streams and states: one list per table, a reference per version."""
    if isinstance(datasets, Mapping):
        streams = [stream_of(dataset) for dataset in datasets.values() if contains_stream(dataset)]
        if not streams:
            raise InvalidArgumentError(
                f"None of the datasets {', '.join(map(repr, datasets)) or '{}'} comes from read_stream(): there is no "
                "version to protect."
            )
    else:
        streams = [stream_of(datasets)]
    refs = [stream.spec.table for stream in streams]
    for saved in [state] if isinstance(state, Mapping) else state:
        refs.append(_version_of_state(saved, refs))
    tables: dict[str, dict[object, TableRef]] = {}
    for ref in refs:
        tables.setdefault(_table(ref), {}).setdefault(ref.version, ref)
    return [list(versions.values()) for versions in tables.values()]


def _version_of_state(state: object, refs: list[TableRef]) -> TableRef:
    """Where the stream that loads ``state`` goes on."""
    provenance = parse_state(state).provenance
    if provenance is None:
        raise StateError(
            "The state has no 'lance_ray_stream' part, so it is one of LanceDB's StreamingDataset and names no version "
            "to protect. The streams' own versions are protected without it."
        )
    tables = {_table(ref): ref for ref in refs}
    named = json.dumps(provenance["table"], sort_keys=True)
    if named in tables:
        return tables[named].with_version(provenance["version"])
    if len(tables) == 1:  # it may have been moved; whether the state fits is a question for load_state_dict
        return refs[0].with_version(provenance["version"])
    raise StateError(
        f"The state is one of table {named}, which no stream reads. Those that are read: {', '.join(tables)}"
    )


def _table(ref: TableRef) -> str:
    return json.dumps(ref.identity(), sort_keys=True)


def _left_behind(ref: TableRef, name: str) -> list[ProtectedVersion]:
    """What an earlier run of this name left behind; that of others is only reported."""
    found = protected_versions(ref)
    own, others = [kept for kept in found if kept.name == name], [kept for kept in found if kept.name != name]
    if own:
        logger.warning(
            "%s: an earlier run %r left version %s protected; it stays so until this run ends.",
            ref.label(),
            name,
            ", ".join(str(kept.version) for kept in own),
        )
    if others:
        logger.warning(
            "%s: other runs protect versions from clean-up, or left them so when they were killed: %s. If one has "
            "ended, lance_ray_stream.unprotect_version(table, %r) removes it.",
            ref.label(),
            ", ".join(f"{kept.name!r} (version {kept.version})" for kept in others),
            others[0].name,
        )
    return own


def _release(ref: TableRef, kept: ProtectedVersion) -> None:
    """Never an error: the run is over, and may have one of its own."""
    try:
        release(ref, kept)
    except Exception as error:
        # Only the texts of this package are known to be without credentials.
        own = isinstance(error, (ProtectionError, TableNotFoundError))
        cause = str(error) if own else type(error).__name__
        logger.warning(
            "Run %r has ended; its protection of version %d is not removed: %s", kept.name, kept.version, cause
        )
