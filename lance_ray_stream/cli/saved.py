"""Saved states: read from files, and put into words. Pure, so that reading one takes no lancedb."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from lance_ray_stream.errors import StateError
from lance_ray_stream.position import is_cycle_boundary
from lance_ray_stream.state import StreamState, parse_state


def read_state(file: str) -> StreamState:
    """The state in a JSON file, or on standard input if ``file`` is ``"-"``.

    Raises:
        StateError: if it cannot be read, is no JSON, or is no state.
    """
    name = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return parse_state(json.loads(text))
    except OSError as error:
        raise StateError(f"cannot read the state {name}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StateError(f"{name} is not JSON ({error}); save json.dumps(stream.state_dict())") from None
    except StateError as error:
        raise StateError(f"{name}: {error}") from None


def rows_per_split(saved: StreamState) -> int | None:
    """L, if the state knows it."""
    rows = None if saved.provenance is None else saved.provenance["rows"]
    return None if rows is None else int(rows) // saved.num_splits


def show_position(saved: StreamState) -> str:
    """Rows received of each split, of how many, in percent."""
    low, high, length = int(saved.position.min()), int(saved.position.max()), rows_per_split(saved)
    text = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    if length:
        percent = 100 * int(saved.position.sum()) / (length * saved.num_splits)
        text += f" of {length:,} rows of each split ({percent:.1f}%)"
        if low == length:
            text += f", the end: loads as the start of epoch {saved.epoch + 1}"
    else:
        text += " rows of each split"
    return text if is_cycle_boundary(saved.position) else text + ", inside a cycle"


def show_table(identity: object) -> str:
    """A table's identity as a state holds it."""
    if not isinstance(identity, Mapping) or not {"uri", "name"} <= set(identity):
        return str(identity)
    path = ".".join([*identity.get("namespace_path", []), identity["name"]])
    return f"{path} in {identity['uri']}"


def show_shuffle(shuffle: object, seed: object, clump_size: object, algorithm: object) -> str:
    """How rows are shuffled."""
    if not shuffle:
        return "none, storage order"
    clumps = "" if clump_size is None else f", in clumps of {clump_size}"
    return f"seed {seed}{clumps}" + ("" if algorithm == "lancedb" else f", by {algorithm!r}")
