# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a copy keeps besides bytes, read back in a form that can be compared: the real cp and fastcp copy one source.

Promises: nothing that is read here changes what is looked at, but for the access times of files. Not looked at:
attributes that only root sees and that no copy is to carry (``trusted.*``), unless asked for.
"""

from __future__ import annotations

import os
import stat
import subprocess
from typing import Any, Dict, List, Optional, Sequence

import cpmodel
import support

Look = Dict[str, Any]
Looks = Dict[str, Look]

ACLS = ("system.posix_acl_access", "system.posix_acl_default")
EVERYTHING = ("kind", "content", "mode", "owner", "mtime", "names", "attributes", "acls")


def look(path: str) -> Look:
    """One entry: kind, content, mode, owner, times in nanoseconds, inode, attributes, ACLs; links not followed."""
    st = os.lstat(path)
    names = os.listxattr(path, follow_symlinks=False)
    attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    kind = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}.get(stat.S_IFMT(st.st_mode), "?")
    return {
        "kind": kind,
        "content": _content(path, kind),
        "mode": "%04o" % stat.S_IMODE(st.st_mode),
        "owner": (st.st_uid, st.st_gid),
        "mtime": st.st_mtime_ns,
        "atime": st.st_atime_ns,
        "inode": (st.st_dev, st.st_ino),
        "links": st.st_nlink,
        "attributes": {name: value for name, value in attributes.items() if name not in ACLS},
        "acls": {name: value for name, value in attributes.items() if name in ACLS},
    }


def _content(path: str, kind: str) -> Any:
    if kind == "link":
        return os.readlink(path)
    if kind != "file":
        return None
    with open(path, "rb") as stream:
        return stream.read()


def looks(top: str) -> Looks:
    """``top`` and everything below it by relative path. ``names``: those below that are one file with an entry."""
    below = cpmodel.entries(os.fsencode(top)) if os.path.isdir(top) and not os.path.islink(top) else []
    paths = [top, *map(os.fsdecode, below)]
    found = {os.path.relpath(path, top): look(path) for path in paths}
    names: Dict[Any, List[str]] = {}
    for path, seen in found.items():
        if seen["kind"] != "directory":
            names.setdefault(seen["inode"], []).append(path)
    for seen in found.values():
        seen["names"] = names.get(seen["inode"])
    return found


def differences(actual: Looks, expected: Looks, fields: Sequence[str] = EVERYTHING) -> List[str]:
    """A line for each field of an entry that is not as expected, and for each entry too few or too many."""
    lines = [f"{path}: missing" for path in expected if path not in actual]
    lines += [f"{path}: unexpected" for path in actual if path not in expected]
    for path in sorted(set(actual) & set(expected)):
        for field in fields:
            found, wanted = actual[path][field], expected[path][field]
            if found != wanted:
                lines.append(f"{path}: {field} is {found!r}, expected {wanted!r}")
    return lines


def run_cp(*words: str, cwd: str = "/", user: Optional[str] = None, umask: int = 0o022) -> support.Result:
    """The real cp, in English."""
    before = os.umask(umask)
    try:
        return support.run(["cp", *words], cwd=cwd, user=user, env={"LC_ALL": "C"})
    finally:
        os.umask(before)


def run_fastcp(*words: str, cwd: str = "/", umask: int = 0o022) -> support.Result:
    """fastcp in a forked child, without a new interpreter; one worker in its own process unless -n says more."""
    return cpmodel.run_fastcp([os.fsencode(word) for word in ("-n1", *words)], os.fsencode(cwd), umask)


def shell(script: str, cwd: str) -> None:
    """Prepare what has no literal: owners, ACLs, attributes."""
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=cwd,
        env=dict(os.environ, PATH=support.PROGRAM_PATH),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(f"{script}: {done.stdout!r}")


def last_line(result: support.Result) -> str:
    """The summary of a run, without the program's name."""
    return result.stderr.splitlines()[-1].partition(": ")[2] if result.stderr else ""
