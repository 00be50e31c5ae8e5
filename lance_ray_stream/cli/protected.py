"""``protected``: the versions of a table that runs protect from clean-up; ends what killed ones left behind."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, astuple

from lance_ray_stream.cli.output import write_csv, write_json, write_table
from lance_ray_stream.table import TableRef
from lance_ray_stream.tags import protected_versions, unprotect_version

_COLUMNS = ("run", "version", "tag")
_WHOLE = 1000


def run(arguments: Namespace) -> int:
    """List what is protected, or with ``--remove`` what no longer is."""
    ref = TableRef(arguments.uri, arguments.table, storage_options=dict(arguments.storage_options))
    removing = arguments.remove is not None
    found = unprotect_version(ref, arguments.remove) if removing else protected_versions(ref)
    if arguments.format == "json":
        write_json({"removed" if removing else "protected": [asdict(kept) for kept in found]})
    elif arguments.format == "csv":
        write_csv(_COLUMNS, map(astuple, found))
    elif removing:
        for kept in found:
            print(f"version {kept.version} is no longer protected by run {kept.name!r}")
    elif found:
        write_table(_COLUMNS, map(astuple, found), max_cell=_WHOLE)  # a name that is cut could not be removed
    else:
        print("no run protects a version of this table")
    return 0
