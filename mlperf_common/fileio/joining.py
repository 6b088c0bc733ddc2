# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How a command line says that it is one rank of several, and where they are to meet.

Apart from ``together``, which does it: this is read at each start, also of a copy by one process, and imports little.
"""

from __future__ import annotations

import argparse
import os

from mlperf_common.fileio import command
from mlperf_common.fileio.words import quote

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import Any, Sequence

JOB, NODE = "job", "node"


def is_first() -> bool:
    """Whether this is rank 0, or there is no telling."""
    from mlperf_common.distributed.launch import LaunchError, detect

    try:
        return detect(os.environ).rank == 0
    except LaunchError:
        return True


def add_options(group: Any, modes: Sequence[str], meeting_help: str) -> None:
    """--distributed and what goes with it."""
    add = group.add_argument
    add(
        "--distributed",
        nargs="?",
        const=JOB,
        choices=modes,
        metavar="HOW",
        help="take part as one rank; HOW: %s" % " or ".join(["job (default)", *modes[1:]]),
    )
    add("--rendezvous", metavar="DIR", action=command.Once, help=meeting_help)
    add(
        "--rank-timeout",
        metavar="SECONDS",
        type=_seconds,
        help="when a silent rank is dead (default: 10; NFS: 90)",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("not a number of seconds: %s" % quote(text))
    return value


def refuse_conflicts(parser: command.Parser, args: Any, others: Sequence[str]) -> None:
    """Options that make no sense without --distributed, or (``others``) none with it, are usage errors."""
    if args.distributed is None:
        for name in ("rendezvous", "rank_timeout"):
            if getattr(args, name) is not None:
                parser.error("--%s needs --distributed" % name.replace("_", "-"))
        return
    if args.distributed == NODE and args.rendezvous is None:
        parser.error("--distributed=node needs --rendezvous: a directory that all nodes share")
    for name in others:
        if getattr(args, name.replace("-", "_")) not in (None, False):
            parser.error("cannot combine --distributed and --%s" % name)


def settle_meeting(args: Any, destination: str) -> None:
    """Where the ranks meet, as ``args.meeting``: --rendezvous, else beside DEST, else in it.

    Beside it, so that DEST keeps the times that it is given at the end. Absolute, since -C goes elsewhere later.
    """
    if args.rendezvous is not None:
        args.rendezvous = args.meeting = os.path.join(os.getcwd(), args.rendezvous)
        return
    there = destination if os.path.isdir(destination) else os.path.dirname(destination.rstrip("/"))
    if there == destination and destination:
        beside = os.path.join(destination, "..")
        if os.access(beside, os.W_OK | os.X_OK) and os.stat(beside).st_dev == os.stat(destination).st_dev:
            there = beside
    args.meeting = os.path.join(os.getcwd(), there)
