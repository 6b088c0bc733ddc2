# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Items of work in a directory that all ranks of a job share: published by one, claimed by each, never twice.

A claim is a directory made by mkdir(2), which is atomic on every shared filesystem. Item K of the first ones is rank
K's without a claim, since at the start all would want the same. After that a rank claims the first item that it does
not see claimed, and only after it has seen that all before it are: so the claimed ones have no gaps, and the first
free one is found by a search that doubles its steps. An old view of the directory (NFS caches what is absent) costs a
vain mkdir, never a double claim.

Promises: every published item goes to one rank. Does not: notice that a rank has died, or wait for anything.
"""

from __future__ import annotations

import json
import os
from typing import Any, Optional, Sequence, Tuple

PUBLISHED = "published"  # how many items there are, and whether that is all: a file whose content changes
CLAIMS = "claims"
ITEMS = "items"
STOP = "stop"


class Publisher:
    """Makes the places in a new, empty directory, then items one by one. Raises OSError."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._count = 0
        for name in (CLAIMS, ITEMS):
            os.mkdir(name, 0o700, dir_fd=place)
        self._say(False)

    def publish(self, item: Any) -> int:
        """One more item, anything that JSON knows; its number."""
        return self.publish_all([item])

    def publish_all(self, items: Sequence[Any]) -> int:
        """More items, told at once; the number of the first."""
        first = self._count
        for item in items:
            write_json(self._place, "%s/%d" % (ITEMS, self._count), item)
            self._count += 1
        self._say(False)
        return first

    def finish(self) -> None:
        """There will be no more."""
        self._say(True)

    def _say(self, complete: bool) -> None:
        write_json(self._place, PUBLISHED, [self._count, complete])


class Claims:
    """One rank's view of the items in the directory open as ``place``. Raises OSError."""

    def __init__(self, place: int, rank: int, ranks: int) -> None:
        self._place = place
        self._rank = rank
        self._first = True
        self._next = ranks  # all below are claimed
        self._count = 0
        self._complete = False

    def next(self) -> Optional[Tuple[int, Any]]:
        """The number of the next item, now this rank's, and the item; None if there is none now."""
        if self.is_stopped():
            return None
        if self._first:
            if not self._is_there(self._rank):
                return None
            self._first = False
            return self._rank, self._read(self._rank)
        number = self._claim()
        return None if number is None else (number, self._read(number))

    def is_over(self) -> bool:
        """Whether there will be no more for this rank."""
        if self.is_stopped():
            return True
        if not self._complete:
            return False
        return self._next >= self._count and not (self._first and self._rank < self._count)

    def stop(self) -> None:
        """No rank gets anything any more."""
        try:
            os.mkdir(STOP, 0o700, dir_fd=self._place)
        except FileExistsError:  # another rank was faster
            pass

    def is_stopped(self) -> bool:
        """Whether a rank has said so."""
        return self._exists(STOP)

    def _claim(self) -> Optional[int]:
        while self._is_there(self._next):
            number = self._next
            try:
                os.mkdir("%s/%d" % (CLAIMS, number), 0o700, dir_fd=self._place)
            except FileExistsError:
                self._next = self._beyond(number)
                continue
            self._next = number + 1
            return number
        return None

    def _beyond(self, claimed: int) -> int:
        """The first item above a claimed one that is not seen to be claimed."""
        step = 1
        while claimed + step < self._count and self._is_claimed(claimed + step):
            claimed += step
            step *= 2
        free = min(claimed + step, self._count)
        while claimed + 1 < free:
            middle = (claimed + free) // 2
            if self._is_claimed(middle):
                claimed = middle
            else:
                free = middle
        return free

    def _is_claimed(self, number: int) -> bool:
        return self._exists("%s/%d" % (CLAIMS, number))

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._place)
        except FileNotFoundError:
            return False
        return True

    def _is_there(self, number: int) -> bool:
        if number >= self._count and not self._complete:
            self._count, self._complete = read_json(self._place, PUBLISHED)
        return number < self._count

    def _read(self, number: int) -> Any:
        return read_json(self._place, "%s/%d" % (ITEMS, number))


def write_json(place: int, name: str, value: Any) -> None:
    """Put a value under a name in the directory ``place``, whole from the start. Raises OSError."""
    fresh = "%s.new" % name
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place)
    with open(fd, "w", encoding="ascii") as stream:
        json.dump(value, stream)
    os.rename(fresh, name, src_dir_fd=place, dst_dir_fd=place)


def read_json(place: int, name: str) -> Any:
    """The value under a name in the directory ``place``. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    with open(fd, encoding="ascii") as stream:
        return json.load(stream)
