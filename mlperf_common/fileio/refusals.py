# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Why a copy is refused before anything is written: one exception a rule, with all problems of its kind.

The wording is GNU cp's where cp has the rule.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from mlperf_common.fileio.words import quote

NAMED_AT_MOST = 20  # how many names one message spells out; the rest is counted


class CopyArgumentError(Exception):
    """A request that is refused before anything is written; one subclass a rule.

    ``lines`` has a line for each problem of that kind, in GNU cp's wording and without a program's name: 20 at
    the most, then how many more there are (``more`` counts those that were not even put into words).
    """

    def __init__(self, lines: Sequence[str], more: int = 0) -> None:
        self.lines = capped(lines, more)
        super().__init__("\n".join(self.lines))


class MissingOperand(CopyArgumentError):
    """No source, or no destination."""


class MissingSource(CopyArgumentError):
    """A source operand that cannot be looked at: absent, empty, a dangling link."""


class OmittedDirectory(CopyArgumentError):
    """A directory among the sources without -r."""


class TargetNotDirectory(CopyArgumentError):
    """Several sources, or -t, and the target is not an existing directory."""


class UnusableDestination(CopyArgumentError):
    """DEST cannot be looked at, or cannot be made where it is asked for (no parent, an empty operand)."""


class NonDirectoryInTheWay(CopyArgumentError):
    """A directory would land on a file, or on a symbolic link below DEST."""


class DirectoryInTheWay(CopyArgumentError):
    """A file would land on a directory."""


class SameFile(CopyArgumentError):
    """A source and its destination are one file or directory."""


class CopyIntoItself(CopyArgumentError):
    """DEST lies inside a source, be it through a followed link."""


class OverwritesSource(CopyArgumentError):
    """A planned destination is, by device and inode, also a planned source."""


class JustCreated(CopyArgumentError):
    """Two sources would land on one name."""


class DestinationExists(CopyArgumentError):
    """Destination files exist and -f was not given."""


class DestinationNewer(CopyArgumentError):
    """Under -u, destination files are not older than their sources and of another size, or links that say something
    else: somebody's work."""


class ManifestInTheWay(CopyArgumentError):
    """The manifest of a copy would be written where a source is, or the copy itself, or where something stands."""


class NotRegularDestination(CopyArgumentError):
    """A destination exists and is a FIFO, socket or device."""


class SpecialFiles(CopyArgumentError):
    """FIFOs, sockets or devices among the sources."""


class UnreadableEntries(Exception):
    """Entries of a tree that could not be looked at or listed: all of them, found in one pass.

    ``entries`` is the list of (path, reason), ``lines`` up to 20 of them in words and a count of the rest.
    """

    def __init__(self, entries: Sequence[Tuple[str, str]]) -> None:
        self.entries = list(entries)
        self.lines = capped(["cannot access %s: %s" % (quote(path), reason) for path, reason in self.entries])
        super().__init__("\n".join(self.lines))


def capped(lines: Sequence[str], more: int = 0) -> List[str]:
    """The first 20 of ``lines`` and, where there are more (besides ``more``), a line that counts the rest."""
    shown = list(lines[:NAMED_AT_MOST])
    more += len(lines) - len(shown)
    return shown + (["... and %d more" % more] if more else [])


class Refusals:
    """The problems found so far, by rule; ``raise_first`` raises the first kind that has any, all of its kind."""

    ORDER = (
        MissingSource,
        OmittedDirectory,
        SpecialFiles,
        SameFile,
        JustCreated,
        CopyIntoItself,
        OverwritesSource,
        NonDirectoryInTheWay,
        DirectoryInTheWay,
        NotRegularDestination,
        UnusableDestination,
        DestinationNewer,
        DestinationExists,
    )

    def __init__(self) -> None:
        self._lines: Dict[Any, List[str]] = {}
        self._more: Dict[Any, int] = {}

    def add(self, rule: Any, text: str, *paths: str) -> None:
        """Note a problem: ``text`` with a %s for each path. Only those that will be shown are put into words."""
        lines = self._lines.setdefault(rule, [])
        if len(lines) < NAMED_AT_MOST:
            lines.append(text % tuple(quote(path) for path in paths))
        else:
            self._more[rule] = self._more.get(rule, 0) + 1

    def drop(self, rule: Any) -> None:
        """Forget the problems of one rule."""
        self._lines.pop(rule, None)

    def raise_first(self) -> None:
        """Raise the refusal that comes first in ``ORDER``, if there is one."""
        for rule in self.ORDER:
            if rule in self._lines:
                raise rule(self._lines[rule], self._more.get(rule, 0))


INTO_ITSELF = "cannot copy a directory, %s, into itself, %s"
OVER_FILE = "cannot overwrite non-directory %s with directory %s"
OVER_DIRECTORY = "cannot overwrite directory %s with non-directory"
SAME_FILE = "%s and %s are the same file"
EXISTS = "cannot create regular file %s: File exists (-f replaces it)"
LINK_EXISTS = "cannot create symbolic link %s: File exists (-f replaces it)"
NEWER = "%s is not older than its source and of another size (-f replaces it)"
LINK_NEWER = "%s is not older than its source and leads elsewhere (-f replaces it)"
OVER_SOURCE = "cannot overwrite source %s with %s"
SPECIAL = "%%s is a %s, neither a regular file nor a directory (--skip-special leaves it out)"
NOT_REGULAR = "cannot overwrite %s: not a regular file"
