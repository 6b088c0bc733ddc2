# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A limit of bytes a second that forked processes keep together.

They share one number: the moment from which the next piece may move. Who has a piece to move takes that moment and
puts it off by what the piece takes at the limit, then sleeps until the moment has come. So the sum is kept however
unevenly they work, and one process alone gets all of it. In any stretch of t seconds at most RATE * t bytes begin to
move, and one piece.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from typing import Callable

PIECE_SECONDS = 0.25  # how much is moved at a time, at the limit's own speed
NAP_SECONDS = 0.1  # how long the stop check may wait

_MOMENT = struct.Struct("q")  # nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share


class Pace:
    """``rate`` bytes a second for this process and all that it forks from now on. Raises OSError."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        # Its lock (fcntl(2)) goes with a process that dies; a semaphore would stay taken, and needs /dev/shm.
        self._fd = _nameless_file()
        os.pwrite(self._fd, _MOMENT.pack(0), 0)

    def piece(self, most: int, block: int) -> int:
        """How many bytes to move at a time: a multiple of ``block``, at most ``most``."""
        return max(block, min(most, int(self.rate * PIECE_SECONDS)) // block * block)

    def wait(self, count: int, check: Callable[[], None]) -> None:
        """Sleep until ``count`` more bytes may begin to move; ``check`` is asked meanwhile and may raise."""
        start = self._reserve(count)
        while True:
            check()
            left = (start - time.monotonic_ns()) / 1e9
            if left <= 0:
                return
            time.sleep(min(left, NAP_SECONDS))

    def _reserve(self, count: int) -> int:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            (due,) = _MOMENT.unpack(os.pread(self._fd, _MOMENT.size, 0))
            start = max(due, time.monotonic_ns())
            os.pwrite(self._fd, _MOMENT.pack(start + count * 1_000_000_000 // self.rate), 0)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return int(start)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pace")
    import tempfile  # a C library before glibc 2.27

    with tempfile.TemporaryFile() as stream:
        return os.dup(stream.fileno())
