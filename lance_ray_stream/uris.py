"""Where tables are: uris made absolute, and what may be shown of them and of what a storage says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from lance_ray_stream.errors import InvalidArgumentError

# In these schemes the part before "@" names a container, not a user.
_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "wasb", "wasbs"})
_SECRET_NAME = re.compile(r"secret|token|passw|credential|authorization|key(_id)?$|sas", re.IGNORECASE)
_NATIVE_SOURCE = re.compile(r"(, )?/[^\s,]*\.rs:\d+(:\d+)?")


def absolute_uri(uri: object) -> str:
    """The uri of a database as every process can use it.

    Raises:
        InvalidArgumentError: It is none, or names what other processes cannot read.
    """
    if isinstance(uri, os.PathLike):
        uri = os.fspath(uri)
    if not isinstance(uri, str) or not uri:
        raise InvalidArgumentError(f"uri must be what lancedb.connect takes, got {type(uri).__name__}")
    try:
        scheme = urlsplit(uri).scheme.lower()
    except ValueError:
        raise InvalidArgumentError("uri cannot be parsed: it must be what lancedb.connect takes") from None
    if scheme == "memory":
        raise InvalidArgumentError(
            "a memory:// table exists in this process alone, and a stream is read by others; write the "
            "table to a directory or an object store first"
        )
    if scheme == "db":
        raise InvalidArgumentError(
            "remote tables (db://...) cannot be streamed: their rows cannot be pinned and fetched by row "
            "id. Open the table where it is stored: lancedb.connect('s3://...') or a local path"
        )
    if scheme == "file":
        uri = re.sub(r"^file:(//)?", "", uri, flags=re.IGNORECASE)
    elif len(scheme) > 1:  # one letter is a drive
        return uri.rstrip("/")
    return os.path.abspath(os.path.expanduser(uri))


def public_uri(uri: str) -> str:
    """The uri without userinfo, query and fragment."""
    parts = urlsplit(uri)
    if len(parts.scheme) < 2:
        return uri
    user, at, host = parts.netloc.rpartition("@")
    if at and parts.scheme in _CONTAINER_SCHEMES:
        host = f"{user.partition(':')[0]}@{host}"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def scrub(text: str, *, uri: str, storage_options: Mapping[str, str] | None) -> str:
    """``text`` without storage options, credentials of the uri and secrets of the environment."""
    text = text.replace(uri, public_uri(uri)) if uri else text
    secrets = {v for k, v in (storage_options or {}).items() if len(v) >= (3 if _SECRET_NAME.search(k) else 6)}
    secrets |= {v for k, v in os.environ.items() if len(v) >= 6 and _SECRET_NAME.search(k)}
    parts = urlsplit(uri)
    if parts.scheme and public_uri(uri) != uri:
        user = None if parts.scheme in _CONTAINER_SCHEMES else parts.username
        values = (value for _, value in parse_qsl(parts.query) if len(value) >= 6)
        secrets |= {part for part in (parts.password, user, parts.query, *values) if part}
    for secret in sorted(secrets | {quote(s, safe="") for s in secrets}, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _NATIVE_SOURCE.sub("", text).strip()
