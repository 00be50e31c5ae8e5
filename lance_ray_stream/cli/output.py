"""How results are written: aligned text, JSON, CSV."""

from __future__ import annotations

import base64
import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The widest cell of a text table; longer values are cut, JSON and CSV have them whole.
_MAX_CELL = 48


def write_facts(facts: Mapping[str, object]) -> None:
    """One line of name and value each."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {show(value)}".rstrip())


def write_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, max_cell: int = _MAX_CELL) -> None:
    """Columns of text, numbers to the right."""
    records = list(rows)
    lines = [[_cut(show(value, digits=""), max_cell) for value in row] for row in records]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    numeric = [all(_is_number(row[i]) for row in records) for i in range(len(header))]
    for line in [header, *lines]:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        print("  ".join(cells).rstrip())


def write_json(value: Mapping[str, object]) -> None:
    """A JSON object with one name on a line; of a list of objects, each on a line of its own."""
    print("{\n" + ",\n".join(f"  {json.dumps(name)}: {_lines(item)}" for name, item in value.items()) + "\n}")


def write_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A header and one line per row; lists and structs are JSON, null is empty."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        values = map(jsonable, row)
        writer.writerow([json.dumps(v) if isinstance(v, (list, dict, bool)) else v for v in values])


def jsonable(value: Any) -> Any:
    """``value`` as JSON types: bytes in base64, NaN and infinities by name, dates and decimals as text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def show(value: object, digits: str = ",") -> str:
    """A value for reading: integers with ``digits`` between the thousands, lists by their items."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format(value, f"{digits}d")
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, str)) for item in value):
        return ", ".join(map(str, value))
    return _dumps(value)


def _lines(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return "[\n    " + ",\n    ".join(map(_dumps, value)) + "\n  ]"
    return _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False)


def _cut(text: str, width: int) -> str:
    text = text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return text if len(text) <= width else text[: width - 3] + "..."


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
