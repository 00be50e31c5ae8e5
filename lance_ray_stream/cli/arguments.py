"""What can be typed: commands, their arguments and their help. Standard library only, so that help is instant."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from lance_ray_stream.errors import InvalidArgumentError

PROGRAM = "lance-ray-stream"

_LAYOUT = """\
Which world sizes a number of splits allows, and what each means for a rank; without NUM_SPLITS, the smallest number
that allows all --world-sizes.

examples:
  lance-ray-stream layout 48
  lance-ray-stream layout 48 --global-batch-size 4800 --rows 1000000
  lance-ray-stream layout --world-sizes 6,8 --num-workers 2
  lance-ray-stream layout 48 --uneven --world-sizes 5,7 --global-batch-size 480
"""
_PLAN = """\
The plan of one epoch in numbers: rows, rows per split, dropped rows, fingerprint. Reads row ids, no payload.

examples:
  lance-ray-stream plan data digits --num-splits 48
  lance-ray-stream plan data digits --num-splits 48 --epoch 3 --seed 42 --filter "label < 5"
  lance-ray-stream plan data digits --state stream.json
"""
_STEP = """\
What was in step 1234? The rows of one global batch, in the order of the plan; with --world-size rank by rank, each in
the order in which it received them. Where a column has the name of one of the first ones, it is TABLE.name.

examples:
  lance-ray-stream step data digits 12 --num-splits 48 --global-batch-size 96 --columns id,label
  lance-ray-stream step data digits 12 --state stream.json --global-batch-size 96 --format json
  lance-ray-stream step data digits 12 --state stream.json --global-batch-size 96 --rank 1 --world-size 8
"""
_VERIFY = """\
Runs the guarantees on your own table and ends with a verdict:
  lancedb  the order is that of lancedb.streaming.StreamingDataset, row for row (not of another --algorithm)
  rows     the table's version delivers the rows of the sampled steps
  batches  every world size and number of reader workers reads the same global batches
  resume   saved after the sampled steps, a run goes on exactly, on every world size
  state    with --state: the state is one of this stream
Ranks run one after another on the plan, without Ray; with --ray as in training. Time and memory grow with the rows and
with the square of the number of world sizes; a million rows take minutes.

examples:
  lance-ray-stream verify data digits --num-splits 48
  lance-ray-stream verify data digits --num-splits 48 --global-batch-size 96 --world-sizes 1,6,8 --num-workers 1,2
  lance-ray-stream verify data digits --state stream.json --ray
"""
_STATE = """\
Reads a state, the JSON of stream.state_dict(): where it stands and in which stream. With OTHER, everything in which the
two differ; exit code 1 if they are not of the same stream. With --table, whether the state fits that table: exit code 1
and the differences if not.

examples:
  lance-ray-stream state stream.json --global-batch-size 96
  lance-ray-stream state monday/stream.json tuesday/stream.json
  lance-ray-stream state stream.json --table data digits
"""
_PROTECTED = """\
The versions of a table that runs protect from LanceDB's clean-up (lance_ray_stream.protect_version), and those that
killed runs left protected. --remove ends the protection by one run; nothing tells whether it has really ended.

examples:
  lance-ray-stream protected data digits
  lance-ray-stream protected data digits --remove run-7
"""
_EXIT_CODES = """\
exit codes: 0 all is well; 1 a guarantee or a state does not hold; 2 wrong usage or input, or the command could not be
carried out. COMMAND --help shows examples."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; wrong usage raises ``InvalidArgumentError``."""
    from lance_ray_stream import __version__

    parser = _Parser(
        prog=PROGRAM,
        description="LanceDB tables as training streams for Ray: layouts, plans, steps, states and their guarantees.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_layout(_add_command(commands, "layout", "the world sizes that a number of splits allows", _LAYOUT))
    _add_plan(_add_command(commands, "plan", "the plan of an epoch in numbers", _PLAN))
    _add_step(_add_command(commands, "step", "the rows of one global batch", _STEP))
    _add_verify(_add_command(commands, "verify", "run the guarantees on a table", _VERIFY))
    _add_state(_add_command(commands, "state", "read, compare and check states", _STATE))
    _add_protected(_add_command(commands, "protected", "versions that runs protect from clean-up", _PROTECTED))
    return parser


def _add_command(commands: Any, name: str, summary: str, text: str) -> argparse.ArgumentParser:
    description, _, examples = text.partition("\nexamples:\n")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _add_layout(command: argparse.ArgumentParser) -> None:
    command.add_argument("num_splits", metavar="NUM_SPLITS", nargs="?", type=int, help="number of splits")
    command.add_argument("--world-sizes", type=_integers, metavar="W,...", help="only these numbers of ranks")
    command.add_argument("--num-workers", type=int, metavar="K", help="reader workers of each rank")
    command.add_argument("--uneven", action="store_true", help="as StreamDataConfig(uneven=True): any number of ranks")
    command.add_argument("--global-batch-size", type=int, metavar="G", help="rows of a step, over all ranks")
    command.add_argument("--rows", type=int, metavar="N", help="rows of the table, for steps and dropped rows")
    _add_format(command, "table", "json", "csv")


def _add_plan(command: argparse.ArgumentParser) -> None:
    _add_table(command)
    _add_stream(command)
    command.add_argument("--columns", type=_names, metavar="NAME,...", help="the columns of the stream")
    _add_format(command, "table", "json")


def _add_step(command: argparse.ArgumentParser) -> None:
    _add_table(command)
    command.add_argument("step", metavar="STEP", type=int, help="the step of the epoch, from 0")
    _add_stream(command)
    command.add_argument("--global-batch-size", type=int, required=True, metavar="G", help="rows of a step")
    command.add_argument("--world-size", type=int, metavar="W", help="show the rank of each row among W")
    command.add_argument("--rank", type=int, metavar="R", help="only the rows of this rank")
    command.add_argument("--columns", type=_names, metavar="NAME,...", help="columns of the table to show")
    _add_format(command, "table", "json", "csv")


def _add_verify(command: argparse.ArgumentParser) -> None:
    _add_table(command)
    _add_stream(command)
    command.add_argument("--columns", type=_names, metavar="NAME,...", help="the columns of the stream")
    command.add_argument(
        "--global-batch-size", type=int, metavar="G", help="rows of a step (default: for about 32 steps an epoch)"
    )
    command.add_argument(
        "--world-sizes",
        type=_integers,
        metavar="W,...",
        help="numbers of ranks (default: three of the legal ones up to 8)",
    )
    command.add_argument(
        "--num-workers", type=_integers, default=[1], metavar="K,...", help="numbers of reader workers (default: 1)"
    )
    command.add_argument(
        "--steps",
        type=_integers,
        metavar="T,...",
        help="steps after which to save (default: none, one, half, all but one, all; and where --state stands)",
    )
    command.add_argument(
        "--lancedb-rows",
        type=int,
        default=100_000,
        metavar="N",
        help="rows to compare with StreamingDataset, from the start of the epoch (default: %(default)s)",
    )
    command.add_argument("--ray", action="store_true", help="run the ranks through Ray, as in training")
    _add_lenient(command)


def _add_state(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help='a state as JSON; "-" is standard input')
    command.add_argument("other", metavar="OTHER", nargs="?", help="another state, to compare")
    command.add_argument("--table", nargs=2, metavar=("URI", "TABLE"), help="check whether the state fits this table")
    command.add_argument("--global-batch-size", type=int, metavar="G", help="show the position in steps of G rows")
    _add_storage_options(command)
    _add_lenient(command)


def _add_protected(command: argparse.ArgumentParser) -> None:
    _add_place(command)
    command.add_argument("--remove", metavar="NAME", help="end the protection by this run")
    _add_storage_options(command)
    _add_format(command, "table", "json", "csv")


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument("uri", metavar="URI", help="folder or object store path, as lancedb.connect takes it")
    command.add_argument("table", metavar="TABLE", help="name of the table")


def _add_table(command: argparse.ArgumentParser) -> None:
    _add_place(command)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="V", help="version of the table (default: the latest)")
    which.add_argument("--tag", metavar="NAME", help="tag of the version")
    _add_storage_options(command)


def _add_storage_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--storage-option",
        dest="storage_options",
        type=_pair,
        default=[],
        action="append",
        metavar="NAME=VALUE",
        help="as in lancedb.connect; may be repeated. Credentials are better left in the environment",
    )


def _add_stream(command: argparse.ArgumentParser) -> None:
    command.add_argument("--num-splits", type=int, metavar="S", help="number of splits")
    command.add_argument("--epoch", type=int, metavar="E", help="the epoch (default: 0, or that of --state)")
    command.add_argument("--seed", type=int, metavar="N", help="shuffle_seed (default: 0)")
    command.add_argument("--no-shuffle", action="store_true", help="rows in storage order")
    command.add_argument("--clump-size", type=int, metavar="N", help="shuffle_clump_size (default: single rows)")
    command.add_argument("--algorithm", metavar="NAME", help='shuffle_algorithm (default: "lancedb")')
    command.add_argument("--filter", metavar="SQL", help="only the rows that pass this condition")
    command.add_argument("--state", metavar="FILE", help="take all of the above, and the version, from this state")


def _add_lenient(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--lenient", action="store_true", help="accept a state that names another address of the table"
    )


def _add_format(command: argparse.ArgumentParser, *formats: str) -> None:
    command.add_argument("--format", choices=formats, default=formats[0], help="default: %(default)s")


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers such as 6,8, got {text!r}") from None


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names such as id,label, got {text!r}")
    return names


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        # The text is not repeated: it may be a credential.
        raise argparse.ArgumentTypeError("expected NAME=VALUE")
    return name, value
