# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The manifest of a copy: what was read while copying, and lines for all that was planned.

Promises: every file, link and directory of the plan has its lines, or there is no manifest. Names are relative to
DEST (to the directory of a DEST that is a file), in byte order, as ``fastmd5 --all`` prints them there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from typing import Iterator, List, Sequence, Tuple

from mlperf_common.fileio import hashplan, walk
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.hashplan import HashEvents, Source
from mlperf_common.fileio.hashtasks import Unread
from mlperf_common.fileio.manifest import DIRECTORY, NOTHING, Chunk, format_line
from mlperf_common.fileio.recording import Recorder
from mlperf_common.fileio.refusals import ManifestInTheWay
from mlperf_common.fileio.traces import temporary_name
from mlperf_common.fileio.twins import Standing, standing_of
from mlperf_common.fileio.words import quote


class Rest(HashEvents):
    """Hashes the sources of what this run did not read, since it stands there already, into a recorder.

    It is at once what ``hash_files`` is to hash, and what it tells.
    """

    files = bytes = problems = 0

    def __init__(self, plan: CopyPlan, recorder: Recorder) -> None:
        self.failures: List[Tuple[str, str]] = []  # (source, reason)
        self._recorder = recorder
        loose = {file.name: file for file in plan.loose}
        self._standing = [*plan.standing, *(standing_of(twin, loose) for twin in recorder.unread)]
        self._waiting = iter(self._standing)

    def sources(self) -> Iterator[Source]:
        """What is to be hashed."""
        return map(_source, self._standing)

    def hashed(self, path: str, chunks: Sequence[Chunk]) -> None:
        self._recorder.add(next(self._waiting).twin, chunks)

    def failed(self, path: str, why: Unread) -> None:
        next(self._waiting)
        self.failures.append((path, why.reason))


def _source(standing: Standing) -> Source:
    directory, name = standing.twin
    if directory is None:
        fixed = hashplan.link_outcome(standing.path, None) if standing.is_link else None
        return Source(standing.shown, None, None, (), standing.path, 0, fixed)
    request = directory.request()
    fixed = hashplan.link_outcomes([name], request)[0] if standing.is_link else None
    shown = directory.shown(name)
    return Source(shown, request.root, request.components, request.links, name, 0, fixed, request.look.follow)


# ------------------------------------------------------------------------------------------------ the lines


def lines(plan: CopyPlan, recorder: Recorder) -> List[bytes]:
    """The manifest, line by line; of an empty file the line that --all gives it."""
    found: List[Tuple[bytes, List[Chunk]]] = [(b".", [(DIRECTORY, 0, NOTHING)])]
    for directory in walk.breadth_first(plan.trees):
        path = _relative(plan, directory.landing())
        if path:
            found.append((os.fsencode(path), [(DIRECTORY, 0, NOTHING)]))
    for (place, name), chunks in recorder.chunks.items():
        landing = (*place.landing(), name) if place is not None else (name,)
        found.append((os.fsencode(_relative(plan, landing)), chunks or [(0, 0, NOTHING)]))
    found.sort(key=lambda item: b"" if item[0] == b"." else item[0])
    return [format_line(path, *chunk) for path, chunks in found for chunk in chunks]


def _relative(plan: CopyPlan, landing: Sequence[str]) -> str:
    return "/".join(landing[len(plan.top) :])


def is_complete(plan: CopyPlan, recorder: Recorder) -> bool:
    """Whether everything that was planned has its lines."""
    return len(recorder.chunks) == len(plan.files) + len(plan.links) + plan.unchanged


def check_place(path: str, plan: CopyPlan, force: bool, what: str = "manifest") -> None:
    """Refuse a manifest, or another file of a name that the user gives, that would be a source, or what the copy makes,
    or that exists. Raises ManifestInTheWay."""
    shown = quote(path)
    parent, name = os.path.split(path)
    if not name or os.path.isdir(path):
        raise ManifestInTheWay(["cannot write the %s to %s: it is a directory" % (what, shown)])
    if _is_planned(os.path.join(os.path.realpath(parent or "."), name), plan):
        raise ManifestInTheWay(["cannot write the %s to %s: the copy writes there" % (what, shown)])
    if not os.path.isdir(parent or "."):
        raise ManifestInTheWay(["cannot write the %s to %s: there is no such directory" % (what, shown)])
    if not os.access(parent or ".", os.W_OK | os.X_OK, effective_ids=True):
        raise ManifestInTheWay(["cannot write the %s to %s: its directory cannot be written to" % (what, shown)])
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(st.st_mode):
        raise ManifestInTheWay(["cannot overwrite %s with the %s: not a regular file" % (shown, what)])
    if _is_source(st, plan):
        raise ManifestInTheWay(["cannot overwrite source %s with the %s" % (shown, what)])
    if not force:
        raise ManifestInTheWay(["cannot create the %s %s: File exists (-f replaces it)" % (what, shown)])


def _is_planned(target: str, plan: CopyPlan) -> bool:
    """Whether the copy makes what ``target``, a path without links, will be. Paths of the plan begin with its base."""
    base = os.path.join(os.path.realpath(plan.base.path), "")
    if not target.startswith(base):
        return False
    wanted = os.path.join(plan.base.path, target[len(base) :])
    places = itertools.chain((d for _, d, _ in plan.files), (d for _, d in plan.links), plan.directories)
    return any(place == wanted for place in places)


def _is_source(st: os.stat_result, plan: CopyPlan) -> bool:
    seen = (st.st_dev, st.st_ino)
    if any((file.entry.dev, file.entry.ino) == seen for file in plan.loose):
        return True
    return any((f.dev, f.ino) == seen for d in walk.breadth_first(plan.trees) for f in d.files())


def write(path: str, token: str, text: Sequence[bytes], force: bool) -> None:
    """Write a manifest beside ``path``, then give it the name. Raises OSError."""
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, temporary_name(name, token + "999"))
    try:
        with open(temporary, "xb") as file:
            file.writelines(text)
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.rename(temporary, path)
        else:
            os.link(temporary, path, follow_symlinks=False)
            os.unlink(temporary)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one that is told
            os.unlink(temporary)
        raise
