# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Names and errors in words, as GNU programs put them."""

from __future__ import annotations

import os
import stat


def quote(path: str) -> str:
    """``path`` as GNU ls and cp show it: quoted for the shell, control and undecodable bytes escaped.

    What is printed can be pasted into bash. Never raises: undecodable bytes arrive as surrogates.
    """
    if path.isprintable():
        if "'" not in path:
            return "'" + path + "'"
        if '"' not in path:
            return '"' + path + '"' if not set(path) & set("$`\\!") else "'" + path.replace("'", "'\\''") + "'"
    pieces = []
    for character in path:
        if character.isprintable():
            pieces.append((False, "'\\''" if character == "'" else character))
        else:
            pieces.append((True, _escaped(character)))
    text, escaping = "'", False
    for escape, piece in pieces:
        if escape != escaping:
            text += "'$'" if escape else "''"
            escaping = escape
        text += piece
    return text + "'"


_SHORT_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\a": "\\a", "\b": "\\b", "\f": "\\f", "\v": "\\v"}


def _escaped(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    return "".join("\\%03o" % byte for byte in os.fsencode(character))


def reason_of(exc: OSError) -> str:
    """The system's words for ``exc``, without number or path."""
    return exc.strerror or str(exc)


def kind_of(mode: int) -> str:
    """The kind of file in words, for messages."""
    kinds = {
        stat.S_IFREG: "regular file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symbolic link",
        stat.S_IFIFO: "FIFO",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "character device",
        stat.S_IFBLK: "block device",
    }
    return kinds.get(stat.S_IFMT(mode), "file of an unknown kind")
