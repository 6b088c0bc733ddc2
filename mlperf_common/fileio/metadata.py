# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Owner, extended attributes, ACL, mode and times: what of them is kept, and in which order they are given.

Owner first, since chown(2) clears set-id bits and capabilities; then attributes, before a mode that may make
the file read-only; then ACL and mode, in this order, since a chmod under a foreign ACL would open it (ran); times
last, because all of the above may move them. Set-id bits are given only to a file that has the source's owner.
As cp -p and cp -a, but for the attributes of filesystems and security modules that mean nothing elsewhere, and
but for this: where group or ACL cannot be carried over, group bits are cleared and it is said.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Iterable, List, NamedTuple, Optional, Set, Tuple, Union

ACCESS_ACL = "system.posix_acl_access"
DEFAULT_ACL = "system.posix_acl_default"

COPIED = ("user.",)  # of the attributes, those with these beginnings
COPIED_NAMES = ("security.capability",)

# Not to be had here, by the many names that filesystems have for it; 524 is ENOTSUPP, which NFS servers leak.
UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, 524)

SET_ID = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX

Target = Union[int, str]  # a descriptor, or a path under /proc/self/fd that leads to one


class Kept(NamedTuple):
    """What the copy keeps of its source, as --preserve names it.

    ``default_mode``: new files get the mode of any new file (--no-preserve=mode). ``xattr_required``: xattr was asked
    for by that name.
    """

    mode: bool = False
    ownership: bool = False
    timestamps: bool = False
    links: bool = False
    xattr: bool = False
    xattr_required: bool = False
    default_mode: bool = False

    def anything(self) -> bool:
        """Whether a new file needs more than the kernel gives it."""
        return self.mode or self.ownership or self.timestamps or self.xattr


class Replaced(NamedTuple):
    """What a destination file leaves to the one that replaces it: owner, mode and access ACL (None: none)."""

    st: os.stat_result
    acl: Optional[bytes]
    acl_known: bool


class Notes:
    """What there is to say about metadata, each thing once: warnings, and problems that make a run incomplete."""

    def __init__(self) -> None:
        self.warnings: Set[str] = set()
        self.problems: Set[str] = set()


class Seen(NamedTuple):
    """What a stat saw of a source: mode, owner, times in nanoseconds."""

    st_mode: int
    st_uid: int
    st_gid: int
    st_atime_ns: int
    st_mtime_ns: int


AnyStat = Union[os.stat_result, Seen]


class AttributesLost(OSError):
    """Extended attributes that were asked for by name could not be kept."""


def creation_mode(kept: Kept, mode: int, directory: bool = False) -> int:
    """The mode to create a file or directory with, to which the kernel applies umask or default ACL.

    What gets owner or mode later is private until then, as with cp.
    """
    if kept.mode:
        return 0o700 | (mode & 0o1000) if directory else 0o600
    if kept.default_mode:
        return 0o777 | (mode & 0o1000) if directory else 0o666
    if directory:  # mkdir(2) takes the sticky bit, and cp gives it
        return mode & (0o1700 if kept.ownership else 0o1777)
    return mode & (0o700 if kept.ownership else 0o777)


def dress(
    target: Target, source: Target, st: AnyStat, kept: Kept, notes: Notes, old: Optional[Replaced] = None
) -> None:
    """Give ``target`` what is ``kept`` of ``source``, whose stat is ``st``; the rest from ``old``, which it replaces.

    Raises OSError; AttributesLost where xattr is required. What may not be kept is in ``notes``.
    """
    owner_kept = group_kept = True
    owner = st if kept.ownership else old.st if old else None
    if owner is not None:
        owner_kept, group_kept = _give_owner(target, owner, notes if kept.ownership else None)
    if kept.xattr:
        _give_attributes(target, source, kept.xattr_required, notes)
    if kept.mode:
        mode = stat.S_IMODE(st.st_mode) & ~(0 if owner_kept else SET_ID)
        if stat.S_ISDIR(st.st_mode) and not mode & SET_ID:  # as cp: what was inherited stays where nothing is given
            mode |= os.stat(target).st_mode & SET_ID
        acl_kept = _copy_acls(target, source, stat.S_ISDIR(st.st_mode), notes)
        _give_mode(target, mode, group_kept, acl_kept, "files", notes)
    elif old is not None:
        acl_kept = old.acl_known and _give_acl(target, ACCESS_ACL, old.acl)
        _give_mode(target, stat.S_IMODE(old.st.st_mode) & 0o777, group_kept, acl_kept, "replaced files", notes)
    elif kept.ownership and not kept.default_mode:
        _widen(target, st.st_mode)
    if kept.timestamps:
        os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def dress_link(name: str, dir_fd: int, st: AnyStat, kept: Kept, notes: Notes) -> None:
    """Give a symbolic link its source's owner and times (it has no mode of its own). Raises OSError."""
    if kept.ownership:
        try:
            os.chown(name, st.st_uid, st.st_gid, dir_fd=dir_fd, follow_symlinks=False)
        except OSError as exc:
            _excuse_owner(exc, notes)
    if kept.timestamps:
        os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=dir_fd, follow_symlinks=False)


# ------------------------------------------------------------------------------------------------ owner and mode


def _give_owner(target: Target, owner: AnyStat, notes: Optional[Notes]) -> Tuple[bool, bool]:
    """Give owner and group as far as permitted; whether both, and whether the group, are now as wanted.

    With ``notes`` (asked for), root's failure is a problem, as for cp; others may mostly give no file away.
    """
    now = os.stat(target)
    if (now.st_uid, now.st_gid) == (owner.st_uid, owner.st_gid):
        return True, True
    try:
        os.chown(target, owner.st_uid, owner.st_gid)
        return True, True
    except OSError as exc:
        _excuse_owner(exc, notes)
    try:
        os.chown(target, -1, owner.st_gid)
        return False, True
    except OSError as exc:
        _excuse_owner(exc, notes)
    return False, now.st_gid == owner.st_gid


def _excuse_owner(exc: OSError, notes: Optional[Notes]) -> None:
    if exc.errno not in (errno.EPERM, errno.EINVAL, errno.EACCES):  # EINVAL: an id unknown to a container
        raise exc
    if notes is not None and os.geteuid() == 0:
        notes.problems.add("cannot preserve the ownership of some files: %s" % exc.strerror)


def _give_mode(target: Target, mode: int, group_kept: bool, acl_kept: bool, whose: str, notes: Notes) -> None:
    if not (group_kept and acl_kept):
        mode &= ~0o070
        what = "group" if acl_kept else "ACL"
        notes.warnings.add("the %s of %s could not be kept; their group bits are cleared" % (what, whose))
    os.chmod(target, mode)


def _widen(target: Target, mode: int) -> None:
    """Group and others get their bits once the owner is right, as far as the umask allows (umask(2) has no getter)."""
    mask = os.umask(0o077)
    os.umask(mask)
    os.chmod(target, stat.S_IMODE(os.stat(target).st_mode) | (mode & 0o077 & ~mask))


# ------------------------------------------------------------------------------------------------ attributes


def _give_attributes(target: Target, source: Target, required: bool, notes: Notes) -> None:
    """Copy the attributes one by one: one that fails does not keep the others back."""
    for name in _attributes(source, required, notes):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as exc:
            _lost("cannot preserve the extended attribute %s" % name, exc, required, notes)


def _attributes(source: Target, required: bool, notes: Notes) -> List[str]:
    try:
        return _wanted(os.listxattr(source))
    except OSError as exc:
        if exc.errno not in UNSUPPORTED:  # a source that knows no attributes has none to lose
            _lost("cannot list extended attributes", exc, required, notes)
        return []


def _lost(what: str, exc: OSError, required: bool, notes: Notes) -> None:
    if required:
        raise AttributesLost(exc.errno, "%s: %s" % (what, exc.strerror)) from exc
    notes.warnings.add("%s: %s" % (what, exc.strerror))


def _wanted(names: Iterable[str]) -> List[str]:
    return [name for name in names if name.startswith(COPIED) or name in COPIED_NAMES]


# ------------------------------------------------------------------------------------------------ ACLs


def _copy_acls(target: Target, source: Target, directory: bool, notes: Notes) -> bool:
    """Give the source's ACLs; whether the access ACL is now the source's."""
    if directory and not _give_acl(target, DEFAULT_ACL, read_acl(source, DEFAULT_ACL)):
        notes.problems.add("cannot preserve the default ACL of some directories")
    kept = _give_acl(target, ACCESS_ACL, read_acl(source, ACCESS_ACL))
    if not kept:
        notes.problems.add("cannot preserve the ACL of some files")
    return kept


def _give_acl(target: Target, which: str, acl: Optional[bytes]) -> bool:
    """Set an ACL, or remove the one that the directory's default gave; whether that worked."""
    try:
        if acl is not None:
            os.setxattr(target, which, acl)
        else:
            os.removexattr(target, which)
    except OSError as exc:
        return acl is None and exc.errno in (errno.ENODATA, *UNSUPPORTED)
    return True


def read_acl(source: Target, which: str) -> Optional[bytes]:
    """The ACL in the kernel's form, or None where there is none or no such thing. Raises OSError."""
    try:
        return os.getxattr(source, which)
    except OSError as exc:
        if exc.errno in (errno.ENODATA, *UNSUPPORTED):
            return None
        raise
