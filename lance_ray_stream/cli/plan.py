"""``plan``: the plan of one epoch in numbers."""

from __future__ import annotations

from argparse import Namespace

from lance_ray_stream.cli.output import write_facts, write_json
from lance_ray_stream.cli.stream import plan_of, stream_of


def run(arguments: Namespace) -> int:
    """N, L, dropped rows and fingerprint, with what they were planned from."""
    stream = stream_of(arguments)
    plan = plan_of(stream)
    if arguments.format == "table":
        write_facts(stream.facts(plan))
    else:
        write_json(stream.record(plan))
    return 0
