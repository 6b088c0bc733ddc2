# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What the user asked of a copy, what a process has learned of devices meanwhile, and how that comes back.

Promises: whatever was refused is kept with its reason, and told once.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Dict, NamedTuple, Set, Tuple

from mlperf_common.fileio import serverside, words
from mlperf_common.fileio.metadata import Kept, Notes

if TYPE_CHECKING:
    from mlperf_common.fileio.workers import Worker

AUTO, ALWAYS, NEVER = "auto", "always", "never"

# Below this many bytes buffered I/O is used: opening, aligning and waiting for the device costs more than the
# page cache does. See tests/bench for the measurement.
DIRECT_MINIMUM = 1 << 20

# Errors of the destination after which every other file would fail too (write(2), mkdir(2)).
FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Options(NamedTuple):
    """What the user asked of a copy; it travels with every task. ``token`` is the run's, for temporary names.

    ``direct``, ``sparse``, ``reflink``: AUTO, NEVER, and ALWAYS for the first and last. ``ignore_times``: of a source
    only size and inode are compared. ``digests``: MD5 of what is read are wanted; ``verify``: and compared with
    what is on the storage then. ``resume``: large files have temporaries that outlive the run.
    """

    token: str
    force: bool = False
    kept: Kept = Kept()
    ignore_times: bool = False
    direct: str = AUTO
    sparse: str = AUTO
    reflink: str = AUTO
    fsync: bool = False
    digests: bool = False
    verify: bool = False
    resume: bool = False


class Facts:
    """What this process has learned of devices: no O_DIRECT, no nameless files; and what it has to say of it.

    ``refused`` maps (side, device) to the reason why I/O there is buffered; ``direct`` holds the sides that
    moved bytes with O_DIRECT. ``uncloned`` holds the pairs of devices between which nothing can be cloned;
    ``cloned`` says that something was. ``notes`` are to be passed on, each once.
    """

    def __init__(self, options: Options, number: int) -> None:
        self.options = options
        self.suffix = "%s%03d" % (options.token, number)
        self.refused: Dict[Tuple[str, int], str] = {}
        self.direct: Set[str] = set()
        self.nameless: Dict[int, bool] = {}
        self.uncloned: Set[Tuple[int, int]] = set()
        self.cloned = False
        self.served: Dict[int, bool] = {}  # devices, and whether their server copies
        self.by_server = False  # one has
        self.from_cache = False  # something was verified that could not be read from anywhere else
        self.notes = Notes()

    def wants_direct(self, side: str, dev: int, size: int) -> bool:
        """Whether to open a file of ``size`` bytes with O_DIRECT."""
        if self.options.direct == ALWAYS:
            return size > 0
        return size >= DIRECT_MINIMUM and self.options.direct == AUTO and (side, dev) not in self.refused

    def copies_at_server(self, src_dev: int, dst_dev: int) -> bool:
        """Whether bytes between these devices are to be copied by their server, as far as is known."""
        options = self.options
        if src_dev != dst_dev or NEVER in (options.direct, options.reflink, options.sparse):
            return False
        if options.direct == ALWAYS:
            return False
        if src_dev not in self.served:
            try:
                self.served[src_dev] = serverside.is_served(src_dev)
            except OSError:  # no /proc: bytes move as everywhere
                self.served[src_dev] = False
        return self.served[src_dev]

    def is_small(self, size: int) -> bool:
        """Whether a file goes through the page cache, because of its size."""
        return size < DIRECT_MINIMUM and self.options.direct != ALWAYS

    def refuse(self, side: str, dev: int, reason: str) -> None:
        """Note that there is no O_DIRECT on a device. Raises OSError where it is wanted always."""
        if self.options.direct == ALWAYS:
            raise OSError(errno.EINVAL, "%s: %s" % (side, reason))
        self.refused[side, dev] = reason


class Learned(NamedTuple):
    """What a worker has learned of devices, for the parent, and its notes: see ``Facts``."""

    refused: Dict[Tuple[str, int], str]
    direct: Set[str]
    cloned: bool
    by_server: bool
    from_cache: bool
    warnings: Set[str]
    problems: Set[str]


class Failed(NamedTuple):
    """A file of a batch that was not copied: its position, errno or 0, the reason."""

    position: int
    errno: int
    reason: str


def facts_of(worker: Worker, options: Options) -> Facts:
    """The worker's facts, kept between tasks."""
    if "facts" not in worker.memory:
        worker.memory["facts"] = Facts(options, worker.number)
    facts: Facts = worker.memory["facts"]
    return facts


def learned(facts: Facts) -> Learned:
    """The facts as they travel; a note is passed on once."""
    notes, facts.notes = facts.notes, Notes()
    return Learned(
        facts.refused, facts.direct, facts.cloned, facts.by_server, facts.from_cache, notes.warnings, notes.problems
    )


def reason_of(exc: BaseException) -> str:
    """Why a file was not copied, in words."""
    return words.reason_of(exc) if isinstance(exc, OSError) else str(exc)
