"""Versions of a table that runs protect from LanceDB's clean-up, each by a tag of its own.

A tag is named ``lance-ray-stream.RUN.vVERSION``: a run that starts again on a newer version than the one it left
behind protects both, since its checkpoint may name the older one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lancedb.table import LanceTable, Table

from lance_ray_stream.errors import InvalidArgumentError, ProtectionError
from lance_ray_stream.table import TableRef, check_table, describe_table, native_error_text

_PREFIX = "lance-ray-stream."
_TAG = re.compile(re.escape(_PREFIX) + r"(?P<name>.+)\.v\d+")
# What Lance allows in a tag, without letters beyond ASCII: with one of those in a name it cannot list its tags.
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_MAX_NAME = 128


@dataclass(frozen=True, kw_only=True)
class ProtectedVersion:
    """A version of a table that a run protects from clean-up.

    Attributes:
        name: of the run.
        version: of the table.
        tag: LanceDB's tag that does it, which errors of LanceDB name.
    """

    name: str
    version: int
    tag: str


def protected_versions(table: Table | TableRef) -> list[ProtectedVersion]:
    """The versions of a table that runs protect at present, or that killed ones left protected; by name and version.

    Args:
        table: an opened LanceDB table or a :class:`TableRef`; its version does not matter.

    Raises:
        InvalidArgumentError: Not a local LanceDB table.
        ProtectionError: The tags cannot be listed.
        TableNotFoundError: The table cannot be opened.
    """
    return _list(_open(table))


def unprotect_version(table: Table | TableRef, name: str) -> list[ProtectedVersion]:
    """Remove the protection that run ``name`` left behind, and return what it was.

    Nothing tells a run that was killed from one that goes on: of the latter, clean-up may take the version away.

    Args:
        table: an opened LanceDB table or a :class:`TableRef`; its version does not matter.
        name: the run, as :func:`protected_versions` lists it.

    Raises:
        InvalidArgumentError: No such run, or not a local LanceDB table.
        ProtectionError: A tag cannot be removed, such as with credentials that may only read.
        TableNotFoundError: The table cannot be opened.
    """
    opened = _open(table)
    known = _list(opened)
    found = [kept for kept in known if kept.name == name]
    if not found:
        names = ", ".join(sorted({repr(kept.name) for kept in known})) or "none"
        raise InvalidArgumentError(f"{name!r} protects no version of {_where(opened)}. Runs that do: {names}")
    for kept in found:
        _delete(opened, kept)
    return found


def check_run_name(name: object) -> str:
    """``name``, if it can be a part of a tag.

    Raises:
        InvalidArgumentError: With a name that can.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and len(name) <= _MAX_NAME:
        return name
    close = re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)).strip("-")[:_MAX_NAME] if isinstance(name, str) else ""
    hint = f"; {close!r} would do" if close else ""
    raise InvalidArgumentError(
        f"name must be up to {_MAX_NAME} letters (A to Z), digits, '-', '_' and single dots between them, because it "
        f"becomes part of a tag of the table, got {name!r}{hint}"
    )


def protect(ref: TableRef, name: str) -> ProtectedVersion:
    """Tag the version of a pinned reference for run ``name``; a tag that is there already stays.

    Raises:
        ProtectionError: The tag cannot be written.
        TableNotFoundError, VersionNotFoundError: The table or its version does not exist.
    """
    table = ref.reopen()
    kept = ProtectedVersion(name=name, version=table.version, tag=f"{_PREFIX}{name}.v{table.version}")
    if kept in _list(table):
        return kept
    try:
        table.tags.create(kept.tag, kept.version)
        return kept
    except Exception as error:
        message = native_error_text(table, error)
    ref.reopen()  # says so if the version is gone by now
    raise ProtectionError(
        f"cannot protect {describe_table(table)}, for run {name!r}: LanceDB cannot write tag {kept.tag!r} ({message}). "
        "It needs credentials that may write to the table; the run itself does not, and works without protection"
    )


def release(ref: TableRef, kept: ProtectedVersion) -> None:
    """Remove one tag.

    Raises:
        ProtectionError: It cannot be removed.
        TableNotFoundError: The table cannot be opened.
    """
    _delete(_open(ref), kept)


def _open(table: Table | TableRef) -> LanceTable:
    """A handle for tags. They are of the table, not of a version: one that is gone has to be no hindrance."""
    return replace(table, version=None).open() if isinstance(table, TableRef) else check_table(table)


def _list(table: LanceTable) -> list[ProtectedVersion]:
    try:
        tags = table.tags.list()
    except Exception as error:
        message = native_error_text(table, error)
    else:
        found = [(_TAG.fullmatch(tag), tag, about["version"]) for tag, about in tags.items()]
        kept = [ProtectedVersion(name=match["name"], version=v, tag=tag) for match, tag, v in found if match]
        return sorted(kept, key=lambda version: (version.name, version.version))
    raise ProtectionError(f"cannot list the tags of {_where(table)}: {message}")


def _delete(table: LanceTable, kept: ProtectedVersion) -> None:
    try:
        table.tags.delete(kept.tag)
        return
    except Exception as error:
        message = native_error_text(table, error)
    raise ProtectionError(f"cannot remove tag {kept.tag!r} of {_where(table)}: {message}")


def _where(table: LanceTable) -> str:
    return describe_table(table).rpartition(", version ")[0]
