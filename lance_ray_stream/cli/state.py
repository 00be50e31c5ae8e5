"""``state``: what a saved state says, how two differ, and whether they fit a table."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lance_ray_stream.cli.output import write_facts, write_table
from lance_ray_stream.cli.saved import read_state, rows_per_split, show_position, show_shuffle, show_table
from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.position import is_cycle_boundary, ranks_are_even
from lance_ray_stream.state import IDENTITY_FIELDS, PLANNED_FIELDS, StreamState, differences


def run(arguments: Namespace) -> int:
    """Describe one state or compare two; then check each against a table, if there is one."""
    if arguments.lenient and arguments.table is None:
        raise InvalidArgumentError("--lenient is about the address of the table: it needs --table")
    files = [arguments.file] if arguments.other is None else [arguments.file, arguments.other]
    if files == ["-", "-"]:
        raise InvalidArgumentError("only one of two states can come from standard input")
    states = [read_state(file) for file in files]
    code = 0
    if len(states) == 1:
        write_facts(_facts(states[0], arguments.global_batch_size))
    else:
        code = _compare(files, states)
    if arguments.table is not None:
        print()
        for file, saved in zip(files, states, strict=True):
            _check_table(file, saved, arguments)
    return code


def _check_table(file: str, saved: StreamState, arguments: Namespace) -> None:
    from lance_ray_stream.cli.stream import fit_of

    uri, table = arguments.table
    arguments.uri = uri  # an error is scrubbed of what it holds
    stream = fit_of(saved, uri, table, storage_options=dict(arguments.storage_options), strict=not arguments.lenient)
    where = show_table(stream.spec.table.identity())
    print(f"FITS: {file} is a state of {where}, version {stream.spec.table.version}{_only_on(saved)}")


def _only_on(saved: StreamState) -> str:
    """The world sizes that can go on from inside a cycle without leaving rows out; nothing if all can."""
    legal = SplitLayout(saved.num_splits).world_sizes()
    even = [size for size in legal if ranks_are_even(saved.position, size)]
    return "" if even == legal else f"; saved inside a cycle, it loads on world sizes {', '.join(map(str, even))} only"


def _facts(saved: StreamState, global_batch_size: int | None) -> dict[str, object]:
    known = saved.provenance
    facts: dict[str, object] = {"epoch": saved.epoch, "position": show_position(saved)}
    if global_batch_size is not None:
        facts["steps"] = _steps(saved, global_batch_size)
    facts["num_splits"] = saved.num_splits
    if saved.splits != range(saved.num_splits):
        facts["counted"] = f"only splits {saved.splits[0]} to {saved.splits[-1]}; merge with the states of all ranks"
    if known is None:
        return facts | {"shuffle": f"seed {saved.shuffle_seed}", "origin": "LanceDB's StreamingDataset; names no table"}
    return facts | {
        "table": show_table(known["table"]),
        "version": str(known["version"]),
        "filter": known["filter"],
        "columns": "all" if known["columns"] is None else known["columns"],
        "shuffle": show_shuffle(
            known["shuffle"], saved.shuffle_seed, known["shuffle_clump_size"], known["shuffle_algorithm"]
        ),
        "rows": known["rows"],
        "fingerprint": known["fingerprint"],
        "saved with": ", ".join(f"{name} {version}" for name, version in known.get("packages", {}).items()),
    }


def _steps(saved: StreamState, global_batch_size: int) -> str:
    """The position in steps."""
    SplitLayout(saved.num_splits).check_global_batch_size(global_batch_size)
    cycles, length = global_batch_size // saved.num_splits, rows_per_split(saved)
    of = "" if length is None else f" of {-(-length // cycles):,}"
    done, rest = divmod(int(saved.position.min()), cycles)
    if not is_cycle_boundary(saved.position) or (rest and int(saved.position.min()) != length):
        return f"inside step {done:,}{of}"
    done += bool(rest)
    return f"{done:,}{of} done"


def _compare(files: list[str], states: list[StreamState]) -> int:
    """A table of all fields and a verdict; 1 if the states are not of the same stream."""
    first, second = (state.identity() for state in states)
    found = set(differences(first, second))
    if states[0].epoch != states[1].epoch:
        found.discard("fingerprint")  # every epoch has its own
    unknown = {name for name in IDENTITY_FIELDS if not _known(first, name) or not _known(second, name)}
    if states[0].epoch != states[1].epoch:
        unknown.add("fingerprint")
    rows: list[tuple[object, ...]] = []
    for name, shown in (("epoch", lambda state: str(state.epoch)), ("position", show_position)):
        one, other = map(shown, states)
        moved = name == "position" and states[0].position.tolist() != states[1].position.tolist()
        rows.append((name, one, other, "moved" if one != other or moved else ""))
    for name in IDENTITY_FIELDS:
        if name in first or name in second:
            verdict = "DIFFERS" if name in found else "not compared" if name in unknown else ""
            rows.append((name, _shown(name, first), _shown(name, second), verdict))
    write_table(("", *files, ""), rows)
    print()
    if found:
        print(f"DIFFERENT STREAMS: {', '.join(name for name in IDENTITY_FIELDS if name in found)}")
        return 1
    moved = any(row[3] == "moved" for row in rows)
    partly = None in (states[0].provenance, states[1].provenance)
    print(
        f"{'NOTHING DIFFERS' if partly else 'SAME STREAM'}, {'at another' if moved else 'at the same'} position"
        + ("; a state of LanceDB's StreamingDataset names no table to compare" if partly else "")
    )
    return 0


def _known(identity: Mapping[str, Any], name: str) -> bool:
    return name in identity and not (name in PLANNED_FIELDS and identity[name] is None)


def _shown(name: str, identity: Mapping[str, Any]) -> object:
    value = identity.get(name)
    return show_table(value) if name == "table" and value is not None else value
