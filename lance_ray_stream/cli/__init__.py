"""The command line ``lance-ray-stream``: a layout, a plan, a step and a state, and whether the guarantees hold.

Every command is a module with a function ``run(arguments) -> exit code``, imported when it is called: help and
arithmetic need neither lancedb nor Ray. Exit codes: 0, all is well; 1, a guarantee or a state does not hold; 2, wrong
usage or input, or the command could not be carried out.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from lance_ray_stream.cli.arguments import PROGRAM, build_parser
from lance_ray_stream.errors import (
    InvalidArgumentError,
    MissingRowsError,
    StateMismatchError,
    VersionNotFoundError,
)

__all__ = ["main"]

DOES_NOT_HOLD = 1
WRONG_INPUT = 2
_INTERRUPTED = 130  # what a shell reports for SIGINT
_BROKEN_PROMISES = (AssertionError, StateMismatchError, VersionNotFoundError, MissingRowsError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one line on stderr.

    Args:
        argv: the arguments after the program's name; those of the process if None.
    """
    try:
        arguments = build_parser().parse_args(argv)
    except InvalidArgumentError as error:
        return _fail(str(error), WRONG_INPUT)
    try:
        with _warnings_in_one_line():
            code: int = import_module(f"lance_ray_stream.cli.{arguments.command}").run(arguments)
            sys.stdout.flush()
        return code
    except (SystemExit, GeneratorExit):
        raise
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # "| head" has seen enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:  # a panic of a native library is no Exception
        if arguments.debug:
            traceback.print_exc()
        return _fail(_describe(error, arguments), DOES_NOT_HOLD if isinstance(error, _BROKEN_PROMISES) else WRONG_INPUT)


def one_line(text: object) -> str:
    """A message without line breaks: indented lines are the items of a list, others are sentences."""
    joined = re.sub(r"\s*\n\s+", "; ", str(text).strip()).replace(":; ", ": ")
    return re.sub(r"\s*\n", ". ", joined)


def _fail(message: str, code: int) -> int:
    print(f"{PROGRAM}: error: {one_line(message)}", file=sys.stderr)
    return code


def _describe(error: BaseException, arguments: Namespace) -> str:
    """The message of an error; one that was not raised on purpose is named, and scrubbed of secrets."""
    if isinstance(error, AssertionError) or type(error).__module__ == "lance_ray_stream.errors":
        return str(error)
    text = str(error)
    if getattr(arguments, "uri", None):
        from lance_ray_stream.uris import scrub

        text = scrub(text, uri=arguments.uri, storage_options=dict(arguments.storage_options))
    return f"{type(error).__name__}: {text} (--debug shows where)"


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        # Others deprecate among themselves; what this package warns of are UserWarnings.
        if issubclass(category, UserWarning):
            print(f"{PROGRAM}: warning: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
