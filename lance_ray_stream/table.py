"""What is read: a LanceDB table pinned to one version, reopened anywhere, named without secrets.

Private names of lancedb that are used here, and nowhere else in the package:

* ``LanceTable._conn``: the connection a handle came from. lancedb offers no public way from a table back to
  the uri and storage options that open it again; ``lancedb.permutation`` reads the same attribute.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import lancedb
import numpy as np
from lancedb.table import AsyncTable, LanceTable, Table

from lance_ray_stream.errors import (
    InvalidArgumentError,
    MissingRowsError,
    TableNotFoundError,
    VersionNotFoundError,
)
from lance_ray_stream.uris import absolute_uri, public_uri, scrub

ConnectionFactory = Callable[[str], Table]

# Handles that one process keeps open at the same time; the least recently used one is let go.
_MAX_OPEN_TABLES = 16
# Words of lancedb's error texts for files that are missing: it has no exception class for them.
_GONE = ("not found", "no such file")


@dataclass(frozen=True, repr=False)
class TableRef:
    """A LanceDB table by name: small, picklable, and good in every process.

    Args:
        uri: Directory or object store path that ``lancedb.connect`` takes. A relative local path becomes
            absolute, because a worker has another working directory.
        name: Name of the table.
        version: Version number or tag, as ``Table.checkout`` takes it; ``None`` means the latest.
        storage_options: What ``lancedb.connect`` needs to reach the storage. They travel in the pickle; use a
            ``connection_factory`` where they must not.
        namespace_path: Namespace of the table, outermost first.
        connection_factory: Called with the table name in every process; returns a table opened for this
            call. It must be picklable and must not hold secrets: let it read them from the environment.

    Raises:
        InvalidArgumentError: An argument has a wrong type, or the table cannot be reopened elsewhere
            (``memory://``, ``db://``, a namespace connection without a factory).
    """

    uri: str
    name: str
    version: int | str | None = field(default=None, kw_only=True)
    storage_options: Mapping[str, str] | None = field(default=None, kw_only=True, hash=False)
    namespace_path: tuple[str, ...] = field(default=(), kw_only=True)
    connection_factory: ConnectionFactory | None = field(default=None, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("version", _check_version(self.version))
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgumentError(f"name must be the name of a table, got {self.name!r}")
        put("namespace_path", _check_namespace(self.namespace_path))
        put("storage_options", _check_storage_options(self.storage_options))
        factory: object = self.connection_factory
        if factory is not None and not callable(factory):
            raise InvalidArgumentError(f"connection_factory must be callable, got {type(factory).__name__}")
        if self.connection_factory is not None and self.storage_options:
            raise InvalidArgumentError(
                "give storage_options or a connection_factory, not both: the factory opens the table, and "
                "the options would put credentials into every pickle"
            )
        uri = absolute_uri(self.uri)
        if self.connection_factory is not None:
            uri = public_uri(uri)  # the factory knows the way in; the uri is then only a name
        elif urlsplit(uri).scheme == "namespace":
            raise InvalidArgumentError(
                f"table {self.name!r} is opened through a namespace connection ({uri}), which cannot be made "
                "again from its uri; pass connection_factory=, a function of the table name that returns "
                "the opened table"
            )
        put("uri", uri)
        # Tells one factory's tables from another's after pickling, when equal factories differ as objects.
        put("_token", uuid.uuid4().hex)

    @classmethod
    def from_table(cls, table: Table, *, connection_factory: ConnectionFactory | None = None) -> TableRef:
        """The reference of an opened table, pinned to the version of that handle (``table.version``).

        The handle is only looked at, never changed. With a ``connection_factory`` the connection's storage
        options are not kept.

        Raises:
            InvalidArgumentError: Not an opened local LanceDB table, or one that lives on a branch.
        """
        opened = check_table(table)
        connection = opened._conn
        options: dict[str, str] = {}
        if connection_factory is None:
            options |= getattr(connection, "storage_options", None) or {}
            options |= opened.initial_storage_options() or {}
        return cls(
            connection.uri,
            opened.name,
            version=opened.version,
            storage_options=options or None,
            namespace_path=tuple(opened.namespace),
            connection_factory=connection_factory,
        )

    @property
    def is_pinned(self) -> bool:
        """Whether the version is a number, so that the reference means the same rows for ever."""
        return isinstance(self.version, int)

    def pin(self) -> TableRef:
        """This reference at a version number: a tag becomes its version, ``None`` the latest version now.

        Raises:
            TableNotFoundError: The table cannot be opened.
            VersionNotFoundError: The tag does not exist.
        """
        if self.is_pinned:
            return self
        table = self._open_new()
        pinned = self.with_version(table.version)
        # The handle is new: it serves the pinned reference too, and opening may be slow.
        _open_tables.put(pinned._cache_key(), pinned._checkout(table))
        return pinned

    def with_version(self, version: int) -> TableRef:
        """The same table at another version."""
        other = replace(self, version=version)
        object.__setattr__(other, "_token", self.__dict__["_token"])
        return other

    def open(self) -> LanceTable:
        """The table, checked out at the version; opened once per process and shared by its threads.

        The handle is this package's own: it is never the user's, and it must not be checked out elsewhere.

        Raises:
            TableNotFoundError: The table cannot be opened.
            VersionNotFoundError: The version no longer exists, or never did.
        """
        if not self.is_pinned:
            return self._open_new()
        return _open_tables.get(self._cache_key(), self._open_new)

    def reopen(self) -> LanceTable:
        """As :meth:`open`, from the storage: a version that was cleaned up is gone, also where it is open already.

        Raises:
            TableNotFoundError: The table cannot be opened.
            VersionNotFoundError: The version no longer exists, or never did.
        """
        table = self._open_new()
        if self.is_pinned:
            _open_tables.put(self._cache_key(), table)
        return table

    def identity(self) -> dict[str, object]:
        """Which table this is, as JSON, without credentials and without the version."""
        return {"uri": public_uri(self.uri), "name": self.name, "namespace_path": list(self.namespace_path)}

    def label(self) -> str:
        """Name and place for a text, without credentials and without the version."""
        path = "".join(f"{part}." for part in self.namespace_path)
        return f"table {path + self.name!r} in {public_uri(self.uri)!r}"

    def __repr__(self) -> str:
        parts = [f"uri={public_uri(self.uri)!r}", f"name={self.name!r}", f"version={self.version!r}"]
        if self.namespace_path:
            parts.append(f"namespace_path={self.namespace_path!r}")
        if self.connection_factory is not None:
            parts.append("connection_factory=...")
        return f"TableRef({', '.join(parts)})"

    def _cache_key(self) -> tuple[object, ...]:
        # A reference that is made anew opens anew: its table may have been dropped and written again meanwhile.
        return (self.__dict__["_token"], self.version)

    def _open_new(self) -> LanceTable:
        table = check_table(self._connect() if self.connection_factory is None else self._call_factory())
        return table if self.version is None else self._checkout(table)

    def _connect(self) -> Table:
        # lancedb.connect creates a missing local directory: a typo must not leave one behind.
        if not urlsplit(self.uri).scheme and not os.path.isdir(self.uri):
            raise TableNotFoundError(f"cannot open {self.label()}: there is no directory {self.uri!r}")
        options = dict(self.storage_options) if self.storage_options else None
        try:
            connection = lancedb.connect(self.uri, storage_options=options)
            return connection.open_table(self.name, namespace_path=list(self.namespace_path) or None)
        except Exception as error:
            message = scrub(str(error), uri=self.uri, storage_options=self.storage_options)
        raise TableNotFoundError(f"cannot open {self.label()}: {message}")

    def _call_factory(self) -> Table:
        assert self.connection_factory is not None
        try:
            table = self.connection_factory(self.name)
        except Exception as error:
            cause = _where(error)  # the text may hold a credential that only the factory knows
        else:
            if not isinstance(table, (Table, AsyncTable)):
                raise InvalidArgumentError(
                    f"connection_factory must return an opened LanceDB table for {self.name!r}, got "
                    f"{type(table).__name__}"
                )
            if _open_tables.holds(table):
                raise InvalidArgumentError(
                    f"connection_factory returned the same opened table twice for {self.name!r}; it must "
                    "open a new one at each call, because every version of a stream has a handle of its own"
                )
            return table
        raise TableNotFoundError(
            f"cannot open {self.label()}: its connection_factory raised {cause}. The text of that error is "
            "withheld because it may hold credentials; call the factory by itself to see it"
        )

    def _checkout(self, table: LanceTable) -> LanceTable:
        assert self.version is not None
        try:
            table.checkout(self.version)
            return table
        except Exception as error:
            message = scrub(str(error), uri=self.uri, storage_options=self.storage_options)
        raise VersionNotFoundError(
            f"{self.label()} has no version {self.version!r} ({message}). {_existing_versions(table, self.version)}"
        )


class _OpenTables:
    """The handles of this process, least recently used first. Safe from threads and after a fork."""

    def __init__(self) -> None:
        self._inherited: list[object] = []
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a factory may open other tables
        self._tables: dict[tuple[object, ...], LanceTable] = {}

    def reset_after_fork(self) -> None:
        # The parent's handles do not work in a forked child, and closing them there may block: keep them.
        self._inherited.append(self._tables)
        self._reset()

    def get(self, key: tuple[object, ...], open_table: Callable[[], LanceTable]) -> LanceTable:
        with self._lock:
            table = self._tables.pop(key, None)  # an empty table is false
            table = open_table() if table is None else table
            self.put(key, table)
            return table

    def put(self, key: tuple[object, ...], table: LanceTable) -> None:
        with self._lock:
            self._tables.pop(key, None)
            self._tables[key] = table
            if len(self._tables) > _MAX_OPEN_TABLES:
                del self._tables[next(iter(self._tables))]

    def holds(self, table: object) -> bool:
        return any(table is other for other in list(self._tables.values()))


_open_tables = _OpenTables()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_tables.reset_after_fork)


def check_table(table: object) -> LanceTable:
    """The table, if it is an opened LanceDB table on its main branch, not a remote one.

    Raises:
        InvalidArgumentError: With the reason and the way out.
    """
    if isinstance(table, AsyncTable):
        raise InvalidArgumentError(
            "an AsyncTable cannot be streamed; open the table with lancedb.connect(...).open_table(...), or "
            "pass TableRef(uri, name)"
        )
    if isinstance(table, Table) and not isinstance(table, LanceTable):
        raise InvalidArgumentError(
            f"remote table {table.name!r} ({type(table).__name__}) cannot be streamed: its rows cannot be "
            "pinned and fetched by row id. Open it where it is stored: lancedb.connect('s3://...') or a "
            "local path"
        )
    if not isinstance(table, LanceTable):
        raise InvalidArgumentError(
            f"expected an opened LanceDB table or a TableRef(uri, name), got {type(table).__name__}"
        )
    absolute_uri(table._conn.uri)  # refuses memory://
    branch = table.current_branch()
    if branch is not None:
        raise InvalidArgumentError(
            f"table {table.name!r} is on branch {branch!r}; version numbers of a branch mean nothing on "
            "main, so a branch cannot be streamed. Open the table without checking out a branch"
        )
    return table


def describe_table(table: LanceTable) -> str:
    """Name, place and version of an opened table for an error text, without credentials."""
    uri = public_uri(table._conn.uri)
    return f"table {table.name!r} in {uri!r}, version {table.version}"


def native_error_text(table: LanceTable, error: BaseException) -> str:
    """What lancedb said, without credentials and without the source lines of its Rust code."""
    connection = table._conn
    options = dict(getattr(connection, "storage_options", None) or {})
    options |= table.initial_storage_options() or {}
    return scrub(str(error) or type(error).__name__, uri=connection.uri, storage_options=options)


def is_gone(message: str) -> bool:
    """Whether lancedb said that data does not exist."""
    return any(word in message.lower() for word in _GONE)


def refuse_if_gone(table: LanceTable, message: str) -> None:
    """Say what it means if lancedb's ``message`` is about data that does not exist.

    Raises:
        MissingRowsError: The version was cleaned up while this process had it open.
    """
    if is_gone(message):
        raise MissingRowsError(
            f"data of {describe_table(table)} no longer exists; was the version cleaned up? Tag a version to "
            f"keep it. LanceDB says: {message}"
        )


def _check_version(version: object) -> int | str | None:
    if version is None or (isinstance(version, str) and version):
        return version
    if isinstance(version, (int, np.integer)) and not isinstance(version, bool) and 0 < version < 2**63:
        return int(version)
    raise InvalidArgumentError(f"version must be a positive version number, a tag or None, got {version!r}")


def _check_namespace(path: object) -> tuple[str, ...]:
    if isinstance(path, (list, tuple)) and all(isinstance(name, str) and name for name in path):
        return tuple(path)
    raise InvalidArgumentError(f"namespace_path must be a sequence of names, got {path!r}")


def _check_storage_options(options: object) -> Mapping[str, str] | None:
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise InvalidArgumentError(f"storage_options must map names to strings, got {type(options).__name__}")
    for key, value in options.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise InvalidArgumentError(f"storage_options must map names to strings; not so for {key!r}")
    return dict(options)


def _existing_versions(table: LanceTable, asked: int | str) -> str:
    if isinstance(asked, str):
        return f"Tags: {', '.join(sorted(table.tags.list())[:20]) or 'none'}"
    versions = sorted(v["version"] for v in table.list_versions())
    shown = [str(v) for v in (versions if len(versions) <= 8 else [*versions[:3], "...", *versions[-4:]])]
    return f"Versions that exist: {', '.join(shown)}; cleanup removes old ones unless they are tagged"


def _where(error: BaseException) -> str:
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
    return type(error).__name__ + place
