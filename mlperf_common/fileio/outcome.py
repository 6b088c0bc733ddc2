# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How a copy ended, for programs: --json's object on stdout and --failed-list's names.

Both are written whatever the end: a copy that was refused or stopped by a signal has them too. The list never says
less than what is missing: where that is not known file by file (a job that ended early, a directory that failed) it
is ".", which stands for all of SOURCE.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from mlperf_common import __version__
from mlperf_common.fileio import command
from mlperf_common.fileio.words import quote, reason_of

if TYPE_CHECKING:
    from mlperf_common.fileio.copyplan import CopyPlan
    from mlperf_common.fileio.report import Summary

_COUNTS = ("files", "links", "directories", "bytes", "unchanged", "same", "failed", "not_tried", "problems")


class Outcome:
    """What is collected while a copy runs. ``leads``: this process is the one that tells."""

    def __init__(self) -> None:
        self.leads = True
        self.broken = False  # it did not come to its end
        self.may_list = True  # the list's place has not been refused
        self.plan: Optional[CopyPlan] = None
        self.summary: Optional[Summary] = None
        self.failures: List[Tuple[str, str]] = []  # (source, reason)
        self.lines: List[str] = []  # other errors


def run(program: str, args: Any, sources: List[str], outcome: Outcome, body: Callable[[], int]) -> int:
    """``body``'s status, or 1 if what is asked for could not be written. What it raises goes on, after that."""
    started = time.monotonic()
    try:
        status = body()
    except BaseException as exc:
        if isinstance(exc, Exception):
            outcome.lines.extend(command.lines_of(exc))
        else:
            outcome.lines.append("stopped by a signal")
        outcome.broken = True
        command.stdout().stop_flag = None  # the signal has been seen: what is told now is told
        _tell(program, args, sources, outcome, 1, started)
        command.stdout().flush()
        raise
    return _tell(program, args, sources, outcome, status, started)


def _tell(program: str, args: Any, sources: List[str], outcome: Outcome, status: int, started: float) -> int:
    if not outcome.leads or args.dry_run:
        return status
    if args.failed_list is not None and outcome.may_list:
        try:
            _write_list(args, sources[0], outcome, status)
        except OSError as exc:
            status = 1
            outcome.lines.append("cannot write %s: %s" % (quote(args.failed_list), reason_of(exc)))
            command.say(program, outcome.lines[-1])
    if args.json:
        text = json.dumps(_object(program, args, sources, outcome, status, time.monotonic() - started))
        command.stdout().write(text.encode("ascii") + b"\n")
    return status


def _write_list(args: Any, source: str, outcome: Outcome, status: int) -> None:
    from mlperf_common.fileio import copymanifest

    # Where there is no plan nobody has looked whether the list would replace a source.
    replaces = args.force and outcome.plan is not None
    names = failed_names(source, outcome, status)
    text = [os.fsencode(name) + b"\0" for name in names]
    copymanifest.write(args.failed_list, os.urandom(5).hex(), text, replaces)


def failed_names(source: str, outcome: Outcome, status: int) -> List[str]:
    """What is to be copied again, relative to ``source``, in byte order."""
    summary = outcome.summary
    if outcome.broken or summary is None or summary.not_tried or summary.problems or summary.stopped:
        return ["."] if status else []
    start = os.path.join(source, "")
    names = {path[len(start) :] if path.startswith(start) else "." for path, _ in outcome.failures}
    return sorted(names, key=os.fsencode)


def _object(
    program: str, args: Any, sources: List[str], outcome: Outcome, status: int, seconds: float
) -> Dict[str, Any]:
    summary = outcome.summary
    errors: List[Dict[str, Optional[str]]] = [
        {"source": path, "message": reason} for path, reason in outcome.failures
    ]
    errors += [{"source": None, "message": line} for line in outcome.lines]
    return {
        "program": program,
        "version": __version__,
        "status": status,
        "complete": status == 0,
        **{name: getattr(summary, name) if summary is not None else 0 for name in _COUNTS},
        "seconds": round(seconds, 3),
        "io": summary.io_mode() if summary is not None else None,
        "stopped": (summary.stopped or None) if summary is not None else None,
        "errors": errors,
        "sources": sources,
        "options": {name: _plain(value) for name, value in sorted(vars(args).items()) if name not in _INTERNAL},
    }


_INTERNAL = ("operands", "meeting")


def _plain(value: Any) -> Any:
    return value._asdict() if hasattr(value, "_asdict") else value
