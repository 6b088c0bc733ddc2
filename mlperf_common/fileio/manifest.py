# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
r"""The line that fastmd5 prints for a chunk: ``path TAB offset TAB size TAB md5hex``, and how it is read
back.

Promises: a line is one line and has three tabs, whatever bytes the path has; ``parse_line(format_line(x)) ==
x`` for every path; a line that ``format_line`` could not have made is refused with a reason.

A path with a newline, carriage return or backslash is written as GNU md5sum does it: the line starts with a
backslash, and the path has ``\n``, ``\r``, ``\\``. A tab is ``\t`` besides, which is ours alone, since our
fields are separated by tabs. All other bytes stand for themselves.

Paths are str outside (undecodable bytes as surrogates, as os.fsdecode gives them) and bytes in the line.
Nothing here knows what a path, an offset or a digest is of.
"""

from __future__ import annotations

import os
import re
from typing import Match, NamedTuple, Tuple, Union

CHUNK_SIZE = 1 << 30

# What stands in place of an offset where a line is of no chunk of a file: --all.
DIRECTORY = -1
LINK = -2
NOTHING = "d41d8cd98f00b204e9800998ecf8427e"  # the MD5 of no bytes

_ESCAPES = {b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t"}
_UNESCAPES = {escaped: raw for raw, escaped in _ESCAPES.items()}
_TO_ESCAPE = re.compile(rb"[\\\n\r\t]")
_ESCAPED = re.compile(rb"\\.?", re.DOTALL)  # "." so that an unknown or cut escape is found, too

# No sign but a minus, no leading zeros, ASCII digits: one spelling for one number.
_NUMBER = re.compile(rb"-?[1-9][0-9]{0,18}|0")
_DIGEST = re.compile(rb"[0-9a-f]{32}")


Chunk = Tuple[int, int, str]  # offset and size in bytes, MD5 in hexadecimal


class ManifestError(ValueError):
    """A line that is no line of ours; the message says what is wrong with it."""


class Line(NamedTuple):
    """What a line says; see ``parse_line``."""

    path: str
    offset: int  # bytes; -1 and -2 mark what is no chunk of a file (a directory, a link)
    size: int  # bytes
    digest: str  # 32 hexadecimal digits, lower case


def escape(name: Union[str, bytes]) -> Tuple[bytes, bytes]:
    """(what the line starts with: a backslash or nothing, ``name`` as it stands in the line)."""
    raw = os.fsencode(name)
    escaped = _TO_ESCAPE.sub(_escape_one, raw)
    return (b"\\" if escaped != raw else b""), escaped


def _escape_one(match: Match[bytes]) -> bytes:
    return _ESCAPES[match.group()]


def unescape(name: bytes) -> bytes:
    """The bytes of a name that stands escaped in a line; ManifestError for an escape that is none."""
    return _ESCAPED.sub(_unescape_one, name)


def _unescape_one(match: Match[bytes]) -> bytes:
    try:
        return _UNESCAPES[match.group()]
    except KeyError:
        raise ManifestError(f"unknown escape {ascii(match.group())[1:]} in the name") from None


def format_line(path: Union[str, bytes], offset: int, size: int, md5hex: str) -> bytes:
    """The line of one chunk, with its newline; ``offset`` and ``size`` in bytes."""
    prefix, escaped = escape(path)
    return b"%s%s\t%d\t%d\t%s\n" % (prefix, escaped, offset, size, md5hex.encode("ascii"))


def format_zero(path: Union[str, bytes], offset: int, size: int, md5hex: str) -> bytes:
    """The same fields, the path as it is, ended by NUL: no byte of a path needs to be escaped."""
    return b"%s\t%d\t%d\t%s\0" % (os.fsencode(path), offset, size, md5hex.encode("ascii"))


def format_json(path: Union[str, bytes], offset: int, size: int, md5hex: str) -> bytes:
    """The same fields as one JSON object on a line.

    A path is UTF-8 here whatever the locale says; bytes that are not are surrogates, as Python has them.
    """
    import json  # 3 ms, which copies need not wait for

    text = os.fsencode(path).decode("utf-8", "surrogateescape")
    fields = {"path": text, "offset": offset, "size": size, "md5": md5hex}
    return json.dumps(fields).encode("ascii") + b"\n"


def parse_zero(line: bytes) -> Line:
    """What a line of ``format_zero`` says; its NUL may be there or not. ManifestError."""
    fields = line.rstrip(b"\0").rsplit(b"\t", 3)
    if len(fields) != 4:
        raise ManifestError(f"{len(fields)} fields separated by tabs instead of 4")
    return _line(fields[0], *fields[1:])


def parse_json(line: bytes) -> Line:
    """What a line of ``format_json`` says. ManifestError."""
    import json

    try:
        fields = json.loads(line)
        path, offset, size, digest = (fields[name] for name in ("path", "offset", "size", "md5"))
        return _line(path.encode("utf-8", "surrogateescape"), b"%d" % offset, b"%d" % size, digest.encode("ascii"))
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ManifestError("it is no JSON object with path, offset, size and md5") from exc


def parse_line(line: bytes) -> Line:
    """What a line says; its newline may be there or not. ManifestError for whatever ``format_line`` would not
    write, so that a damaged line is noticed and a name has one spelling only."""
    if line.endswith(b"\n"):
        line = line[:-1]
    is_escaped = line.startswith(b"\\")
    fields = line[is_escaped:].split(b"\t")
    if len(fields) != 4:
        raise ManifestError(f"{len(fields)} fields separated by tabs instead of 4")
    return _line(_parse_name(fields[0], is_escaped), *fields[1:])


def _line(name: bytes, offset: bytes, size: bytes, digest: bytes) -> Line:
    if not name or b"\0" in name:
        raise ManifestError("the name is empty, or has a NUL byte")
    if not _DIGEST.fullmatch(digest):
        raise ManifestError("the digest is not 32 hexadecimal digits in lower case")
    return Line(
        os.fsdecode(name),
        _parse_number(offset, "offset", least=-2),
        _parse_number(size, "size", least=0),
        digest.decode("ascii"),
    )


def _parse_name(name: bytes, is_escaped: bool) -> bytes:
    raw = unescape(name) if is_escaped else name
    if not raw:
        raise ManifestError("the name is empty")
    if b"\0" in raw:
        raise ManifestError("the name has a NUL byte")
    if escape(raw) != (b"\\" * is_escaped, name):
        raise ManifestError("the name is not escaped as it should be")
    return raw


def _parse_number(text: bytes, field: str, least: int) -> int:
    # int() alone would take " 1", "+1" and "1_0".
    if not _NUMBER.fullmatch(text) or int(text) < least:
        raise ManifestError(f"the {field} is {ascii(text)[1:]}, not a number of bytes")
    return int(text)
