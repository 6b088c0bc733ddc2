# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The copy engine called as a library: a plan carried out in this process, or on a pool of workers.

One function for both, so that each test asks the same of both. What the engine says is kept and never printed.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, Union
from unittest import mock

import support  # noqa: F401 (it says where the package is)

from mlperf_common.fileio import (
    batches,
    copyplan,
    copytasks,
    facts,
    listing,
    report,
    stopping,
    transfer,
    workers,
)

KIB = 1 << 10
MIB = 1 << 20
IN_PROCESS = 1  # the number of workers for which there is no pool, as on the command line
TOKEN = "0123456789"


class Said(report.Events):
    """What a copy had to say, its events in the order in which they came."""

    verbose = True

    def __init__(self) -> None:
        self.failures: List[Tuple[str, str]] = []  # (source, reason)
        self.lines: List[str] = []  # problems
        self.warnings: List[str] = []
        self.done: List[str] = []  # sources

    def copied(self, source: str, destination: str) -> None:
        self.done.append(source)

    def failed(self, source: str, destination: str, reason: str) -> None:
        self.failures.append((source, reason))

    def problem(self, line: str) -> None:
        self.lines.append(line)

    def warning(self, line: str) -> None:
        self.warnings.append(line)

    def reason(self) -> str:
        """The reason of the only failure."""
        if len(self.failures) != 1:
            raise AssertionError(f"not one failure: {self.failures}")
        return self.failures[0][1]


Outcome = Tuple[report.Summary, Said]


def copy(
    sources: Union[str, Sequence[str]],
    destination: str,
    workers_wanted: int = IN_PROCESS,
    force: bool = False,
    buffer_size: int = 2 * MIB,
    between: Optional[Callable[[], Any]] = None,
    on_moved: Optional[Callable[[int], None]] = None,
    follow: str = copyplan.FOLLOW_ALL,
) -> Outcome:
    """Plan the copy and carry it out; `between` runs in between, `on_moved` at each report of bytes moved."""
    said = Said()
    pool = make_pool(copytasks.FUNCTIONS, workers_wanted, buffer_size)
    roots = listing.Roots(pool)
    try:
        names = [sources] if isinstance(sources, str) else list(sources)
        plan = copyplan.plan_copy_operations(
            names, destination, force=force, list_directories=listing.PoolLister(pool, roots), follow=follow
        )
        if between:
            between()
        if on_moved:
            pool.on_moved = on_moved
        summary = transfer.copy(plan, pool, roots, facts.Options(TOKEN, force), said)
    finally:
        roots.close()
        pool.close()
    return summary, said


def make_pool(functions: Any, count: int, buffer_size: int = 2 * MIB) -> Any:
    """What runs tasks: `count` worker processes, or this process if it is IN_PROCESS."""
    if count == IN_PROCESS:
        return workers.InProcess(functions, buffer_size, stopping.StopFlag())
    return workers.Pool(count, functions, buffer_size, stopping.StopFlag())


@contextlib.contextmanager
def limits(extent: int = batches.EXTENT, direct_minimum: int = facts.DIRECT_MINIMUM) -> Iterator[None]:
    """From `extent` bytes on a file is large, from `direct_minimum` on it is moved with O_DIRECT."""
    with mock.patch.object(batches, "EXTENT", extent), mock.patch.object(facts, "DIRECT_MINIMUM", direct_minimum):
        yield


@contextlib.contextmanager
def buffered() -> Iterator[None]:
    """No file is opened with O_DIRECT."""
    with mock.patch.object(facts.Facts, "wants_direct", lambda *_: False):
        yield


def blocks(path: str) -> int:
    """The bytes that a file takes on its disk."""
    return os.stat(path).st_blocks * 512
