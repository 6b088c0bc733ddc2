# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a file server copies itself: where source and destination are one mount of NFS 4.2 or CIFS.

copy_file_range(2) then moves nothing over the network. Elsewhere it is not used: between two files of a local
filesystem it goes through the page cache, and took 2 to 14 s for 4 GiB.

Promises: a refusal, or a call that moves nothing, leaves the rest of the range to reads and writes, which find out
whether the source has shrunk. Not promised: that the server does not read and write the bytes itself.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from mlperf_common.fileio.workers import Worker

PIECE = 64 << 20  # bytes asked for at a time, between which a stop is noticed

# What says that these two files cannot be copied so, not that something is wrong (copy_file_range(2)).
REFUSED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY)

_MOUNTS = "/proc/self/mountinfo"


def is_served(dev: int) -> bool:
    """Whether a device is a mount whose server can copy files. Raises OSError where mounts cannot be read."""
    if not hasattr(os, "copy_file_range"):  # a C library before glibc 2.27
        return False
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as stream:
        return any(_is_serving(line, "%d:%d" % (os.major(dev), os.minor(dev))) for line in stream)


def _is_serving(line: str, device: str) -> bool:
    """Whether a line of mountinfo (proc(5)) is of this device, and of NFS 4.2 or CIFS."""
    mount, _, filesystem = line.partition(" - ")
    if mount.split(" ")[2:3] != [device]:
        return False
    kind, *rest = filesystem.split()
    if kind in ("cifs", "smb3"):
        return True
    return kind == "nfs4" and "vers=4.2" in rest[-1].split(",")


def copy_range(worker: Worker, src: int, dst: int, start: int, end: int) -> int:
    """Have the server copy the bytes from ``start`` to ``end`` at their place; where it stopped: at ``end``, or before
    it if it does not do so. Raises OSError, Interrupted.
    """
    at = start
    while at < end:
        moved = _copy_some(src, dst, worker.turn(min(PIECE, end - at)), at)
        if not moved:
            return at
        at += moved
        worker.moved(moved)
    return at


def _copy_some(src: int, dst: int, count: int, at: int) -> Optional[int]:
    try:
        return os.copy_file_range(src, dst, count, at, at)
    except OSError as exc:
        if exc.errno not in REFUSED:
            raise
        return None
