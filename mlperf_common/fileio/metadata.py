# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Owner, extended attributes, ACL, mode and times: what of them is kept, and in which order they are given.

Owner first, since chown(2) clears set-id bits and capabilities; then attributes, before a mode that may make
the file read-only; then ACL and mode; times last, because all of the above may move them. Set-id bits are given
only to a file that has the source's owner. As cp -p and cp -a, but for the attributes of filesystems and
security modules that mean nothing elsewhere (``SKIPPED``).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Iterable, NamedTuple, Optional, Set, Union

ACCESS_ACL = "system.posix_acl_access"
DEFAULT_ACL = "system.posix_acl_default"

COPIED = ("user.",)  # of the attributes, those with these beginnings
COPIED_NAMES = ("security.capability",)

# Not to be had here, by the many names that filesystems have for it; 524 is ENOTSUPP, which NFS servers leak.
_NO_ACL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, 524)

Target = Union[int, str]  # a descriptor, or a path under /proc/self/fd that leads to one


class Kept(NamedTuple):
    """What the copy keeps of its source, as --preserve names it; ``xattr_required``: asked for by that name."""

    mode: bool = False
    ownership: bool = False
    timestamps: bool = False
    links: bool = False
    xattr: bool = False
    xattr_required: bool = False


class Notes:
    """What there is to say about metadata, each thing once: warnings, and problems that make a run incomplete."""

    def __init__(self) -> None:
        self.warnings: Set[str] = set()
        self.problems: Set[str] = set()


class AttributesLost(OSError):
    """Extended attributes that were asked for by name could not be kept."""


def give(target: Target, source: Target, st: os.stat_result, kept: Kept, notes: Notes) -> None:
    """Give ``target`` what is ``kept`` of ``source``, whose stat is ``st``: regular files and directories.

    Raises OSError; AttributesLost where xattr is required. What may not be kept is in ``notes``.
    """
    mode = stat.S_IMODE(st.st_mode)
    if kept.ownership and not _give_owner(target, st, notes):
        mode &= ~(stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX)
    if kept.xattr:
        _give_attributes(target, source, kept.xattr_required, notes)
    if kept.mode:
        copy_acl(target, source, ACCESS_ACL, notes)
        if stat.S_ISDIR(st.st_mode):
            copy_acl(target, source, DEFAULT_ACL, notes)
        os.chmod(target, mode)
    if kept.timestamps:
        os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def give_link(name: str, dir_fd: int, st: os.stat_result, kept: Kept, notes: Notes) -> None:
    """Give a symbolic link its source's owner and times (it has no mode of its own). Raises OSError."""
    if kept.ownership:
        try:
            os.chown(name, st.st_uid, st.st_gid, dir_fd=dir_fd, follow_symlinks=False)
        except OSError as exc:
            _excuse_owner(exc, notes)
    if kept.timestamps:
        os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=dir_fd, follow_symlinks=False)


def _give_owner(target: Target, st: os.stat_result, notes: Notes) -> bool:
    """chown, or at least the group; whether both are as in the source. cp's rule: only root's failure counts."""
    try:
        os.chown(target, st.st_uid, st.st_gid)
        return True
    except OSError as exc:
        _excuse_owner(exc, notes)
    try:
        os.chown(target, -1, st.st_gid)
    except OSError as exc:
        _excuse_owner(exc, notes)
    return False


def _excuse_owner(exc: OSError, notes: Notes) -> None:
    if exc.errno not in (errno.EPERM, errno.EINVAL, errno.EACCES):
        raise exc
    if os.geteuid() == 0:
        notes.problems.add("cannot preserve the ownership of some files: %s" % exc.strerror)


def _give_attributes(target: Target, source: Target, required: bool, notes: Notes) -> None:
    try:
        for name in _wanted(os.listxattr(source)):
            os.setxattr(target, name, os.getxattr(source, name))
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS) and not required and not _has_any(source):
            return
        if required:
            raise AttributesLost(exc.errno, "cannot preserve extended attributes: %s" % exc.strerror) from exc
        notes.warnings.add("some extended attributes could not be preserved: %s" % exc.strerror)


def _wanted(names: Iterable[str]) -> Iterable[str]:
    return [name for name in names if name.startswith(COPIED) or name in COPIED_NAMES]


def _has_any(source: Target) -> bool:
    try:
        return bool(_wanted(os.listxattr(source)))
    except OSError:  # a source without attributes has none to lose
        return False


def copy_acl(target: Target, source: Target, which: str, notes: Notes) -> None:
    """Give ``target`` the source's ACL, or remove one that it has from its directory's default, as cp -p does."""
    acl = read_acl(source, which)
    try:
        if acl is not None:
            os.setxattr(target, which, acl)
        else:
            os.removexattr(target, which)
    except OSError as exc:
        if acl is None and exc.errno in (errno.ENODATA, *_NO_ACL):
            return
        notes.problems.add("cannot preserve the ACL of some files: %s" % exc.strerror)


def read_acl(source: Target, which: str) -> Optional[bytes]:
    """The ACL in the kernel's form, or None where there is none or no such thing."""
    try:
        return os.getxattr(source, which)
    except OSError as exc:
        if exc.errno in (errno.ENODATA, *_NO_ACL):
            return None
        raise
