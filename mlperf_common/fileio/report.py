# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a copy has to say: events while it runs, a summary at the end. The engine speaks here and never prints."""

from __future__ import annotations

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import Dict, Set, Tuple


class Events:
    """What happens during a copy, for whoever tells the user; these defaults say nothing."""

    verbose = False  # whether ``copied`` is wanted: it costs two paths a file

    def copied(self, source: str, destination: str) -> None:
        """A file has its final name."""

    def failed(self, source: str, destination: str, reason: str) -> None:
        """A file was not copied."""

    def problem(self, line: str) -> None:
        """Something else makes the copy incomplete."""

    def warning(self, line: str) -> None:
        """Something that the user should know although the copy is complete."""

    def linked(self, source: str, destination: str) -> None:
        """A symbolic link has been copied as one."""

    def resumed(self, source: str, count: int) -> None:
        """So many bytes of a large file were there from an earlier run."""

    def phase(self, label: str) -> None:
        """Another part of the work begins."""

    def trace(self, text: str) -> None:
        """Where in the code an unexpected failure happened, for debugging."""


class Summary:
    """What a copy did."""

    def __init__(self) -> None:
        self.files = 0
        self.links = 0
        self.outside = 0  # of the links, those that lead out of the tree
        self.unchanged = 0  # files that -u left as they are, their bytes not compared
        self.split = 0  # files with several names, each name copied as a file of its own
        self.same = 0  # files that stood there with the same bytes
        self.cloned = False
        self.resumed = 0  # bytes that earlier runs had copied
        self.by_server = False
        self.from_cache = False  # some of what was verified came from the page cache
        self.left_behind = 0  # temporaries of other runs, of which it is not certain that they are dead
        self.directories = 0  # made by this run
        self.bytes = 0
        self.failed = 0  # files
        self.problems = 0  # of directories and workers
        self.not_tried = 0  # files and links
        self.stopped = ""  # why the job ended early, if it did
        self.direct: Set[str] = set()  # the sides that moved bytes with O_DIRECT
        self.never_direct = False  # it was not wanted
        self.refused: Dict[Tuple[str, int], str] = {}  # (side, device) to the reason why not

    def stop(self, reason: str) -> None:
        """End the job early; the first reason counts."""
        self.stopped = self.stopped or reason

    def tried(self) -> int:
        """How many files and links have been dealt with, one way or the other."""
        return self.files + self.links + self.failed + self.same

    def is_complete(self) -> bool:
        """Whether everything that was planned is there, and the source as it was planned."""
        return not (self.failed or self.problems or self.not_tried or self.stopped)

    def io_mode(self) -> str:
        """``direct``, or why and where it was buffered; sides that differ are told apart."""
        if not self.direct and not self.refused:
            if self.cloned:
                return "cloned"
            if self.by_server:
                return "copied by the server"
            if not self.bytes:
                return "none (no bytes)"
            return "buffered (%s)" % ("--direct=never" if self.never_direct else "small files")
        words = "direct"
        if self.refused:
            why = "; ".join(sorted({"%s: %s" % (side, reason) for (side, _), reason in self.refused.items()}))
            words = "%s (%s)" % ("partly direct" if self.direct else "buffered", why)
        if self.by_server:
            words = "partly copied by the server, " + words
        return "partly cloned, " + words if self.cloned else words
