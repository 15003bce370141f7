"""The command ``epicute``: a verb per module, imported when it is used.

A verb is a module of this package with ``run(args) -> exit status`` and, where it has options,
``add_arguments(parser)``. One whose module is not installed is not offered.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from epicute.errors import EpicuteError

__all__ = ["VERBS", "main"]

VERBS = {
    "doctor": "what this machine can compile and run, and what it lacks",
    "demo": "compose, compile and run fused projections of a small real model, and let it speak",
    "generate": "go on with a text, greedily, token by token",
    "compile": "compile one composition and show the report; needs no GPU",
    "cache": "list or clear the compiled kernels on disk",
}
"""Verb -> what it does; the module of the same name does it."""

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own; gives the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(next((word for word in words if not word.startswith("-")), None))
    args = parser.parse_args(words)
    if args.verb is None:
        parser.print_help()
        return USAGE
    try:
        return int(_module(args.verb).run(args))
    except EpicuteError as error:
        print(f"epicute {args.verb}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has left; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all verbs, with the options of the chosen one alone."""
    parser = argparse.ArgumentParser(
        "epicute", description="Inference kernels in CuTe DSL, with epilogues you compose."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", title="verbs")
    for verb, says in VERBS.items():
        if importlib.util.find_spec(f"{__name__}.{verb}") is not None:
            inner = verbs.add_parser(verb, help=says, description=says)
            if verb == chosen:
                getattr(_module(verb), "add_arguments", lambda _: None)(inner)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from epicute.jit.environment import version_of

        print(f"epicute {version_of('epicute').replace('absent', '(a checkout, not installed)')}")
        parser.exit(0)


def _module(verb: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{verb}")
