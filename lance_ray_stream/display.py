"""How objects show themselves in a notebook: small HTML tables. Strings only; nothing is drawn or read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"


def facts_html(title: str, facts: Mapping[str, object]) -> str:
    """A title over lines of name and value; everything is escaped, whole numbers get thousands separators."""
    lines = (f"<tr><th style='{_CELL}'>{escape(name)}</th>{_cell(value)}</tr>" for name, value in facts.items())
    return f"<table><caption style='text-align:left'><b>{escape(title)}</b></caption>{''.join(lines)}</table>"


def table_html(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A title over a table with one line of ``header`` and one line for each of ``rows``."""
    names = "".join(f"<th style='{_CELL}'>{escape(name)}</th>" for name in header)
    lines = ("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        f"<table><caption style='text-align:left'><b>{escape(title)}</b></caption>"
        f"<tr>{names}</tr>{''.join(lines)}</table>"
    )


def show_range(numbers: range) -> str:
    """A contiguous range by its ends: ``"3"``, ``"0 .. 5"``, ``"none"``."""
    if not numbers:
        return "none"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} .. {numbers[-1]}"


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"<td style='{_CELL}'>{escape(text)}</td>"
