# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Which entries of a source tree are wanted: those that a list names, without those that a pattern excludes.

Patterns are rsync's (rsync(1), filter rules), as for a transfer of ``SOURCE/``: what is relative to SOURCE, in bytes.
What is excluded is not looked at: neither entered nor refused. A name in a list that is a directory means all of it.
"""

from __future__ import annotations

import os
import re
from array import array
from typing import Any, BinaryIO, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from mlperf_common.fileio.refusals import CopyArgumentError
from mlperf_common.fileio.walk import FIELDS, Listing
from mlperf_common.fileio.words import quote

# What a list names in a directory, and in each of those; the empty name: all of it.
Node = Dict[str, Any]
WHOLE = ""

_CLASSES = {
    "alnum": rb"0-9A-Za-z", "alpha": rb"A-Za-z", "blank": rb" \t", "cntrl": rb"\x00-\x1f\x7f", "digit": rb"0-9",
    "graph": rb"\x21-\x7e", "lower": rb"a-z", "print": rb"\x20-\x7e", "punct": rb"!-/:-@\[-`{-~",
    "space": rb" \t\n\v\f\r", "upper": rb"A-Z", "xdigit": rb"0-9A-Fa-f",
}  # fmt: skip

_NEVER = re.compile(rb"(?!)")


class NotBelow(CopyArgumentError):
    """A name that is to be copied is not one of something below SOURCE."""


# ------------------------------------------------------------------------------------------------------- patterns


class Exclusion:
    """One pattern of --exclude. Raises ValueError if it is empty."""

    def __init__(self, pattern: str) -> None:
        text = os.fsencode(pattern)
        if not text.strip(b"/"):
            raise ValueError("an empty pattern")
        if text.endswith(b"/***"):  # a directory and all below it, which is not entered anyway
            text = text[:-3]
        self.only_directories = text.endswith(b"/")
        text = text[:-1] if self.only_directories else text
        anchored = text.startswith(b"/")
        text = text[1:] if anchored else text
        wild = re.search(rb"[*?\[]", text) is not None
        body = _translated(text) if wild else re.escape(text)
        self._begins_slashed = not anchored and text.startswith(b"**")  # "**/a" is also an "a" at the top
        # How many names of a path, from its end, are compared as a whole; 0: the whole path, or from any name on.
        self._last_names = 0 if anchored or b"**" in text else text.count(b"/") + 1
        if not anchored and b"**" in text and not self._begins_slashed and body is not None:
            body = rb"(?:.*/)?" + body
        self._regex = _NEVER if body is None else re.compile(body + rb"\Z", re.DOTALL)

    def matches(self, path: bytes, is_directory: bool) -> bool:
        """Whether an entry with this path below SOURCE is excluded."""
        if self.only_directories and not is_directory:
            return False
        if self._last_names:
            names = path.split(b"/")
            if len(names) < self._last_names:
                return False
            path = b"/".join(names[-self._last_names :])
        return self._regex.match(b"/" + path if self._begins_slashed else path) is not None


def _translated(text: bytes) -> Optional[bytes]:
    """A wildcard pattern as a regular expression; None for one that matches nothing (a bracket without an end)."""
    found: List[bytes] = []
    at = 0
    while at < len(text):
        letter = text[at : at + 1]
        at += 1
        if letter == b"*":
            stars = len(text) - at + 1 - len(text[at - 1 :].lstrip(b"*"))
            found.append(rb".*" if stars > 1 else rb"[^/]*")
            at += stars - 1
        elif letter == b"?":
            found.append(rb"[^/]")
        elif letter == b"\\":
            if at == len(text):
                return None
            found.append(re.escape(text[at : at + 1]))
            at += 1
        elif letter == b"[":
            piece, at = _bracket(text, at)
            if piece is None:
                return None
            found.append(piece)
        else:
            found.append(re.escape(letter))
    return b"".join(found)


def _bracket(text: bytes, at: int) -> Tuple[Optional[bytes], int]:
    """The set that begins behind a bracket, and where it ends; a slash is in none."""
    negated = text[at : at + 1] in (b"!", b"^")
    at += negated
    members: List[bytes] = []
    first = True
    while at < len(text):
        if text[at : at + 1] == b"]" and not first:
            inside = b"".join(members)
            if negated:
                return b"[^/" + inside + b"]", at + 1
            return (rb"(?!/)[" + inside + b"]" if inside else rb"(?!)"), at + 1
        first = False
        named = re.compile(rb"\[:([a-z]*):\]").match(text, at)
        if named:
            members.append(_CLASSES.get(named.group(1).decode(), b""))
            if named.group(1).decode() not in _CLASSES:
                return None, at
            at = named.end()
            continue
        low, at = _member(text, at)
        if text[at : at + 1] == b"-" and text[at + 1 : at + 2] not in (b"", b"]"):
            high, at = _member(text, at + 1)
            # A range that runs backwards has its first character, as rsync reads it.
            members.append(b"\\x%02x-\\x%02x" % (low[0], high[0] if high >= low else low[0]))
        else:
            members.append(b"\\x%02x" % low[0])
    return None, at


def _member(text: bytes, at: int) -> Tuple[bytes, int]:
    if text[at : at + 1] == b"\\" and at + 1 < len(text):
        at += 1
    return text[at : at + 1], at + 1


# ---------------------------------------------------------------------------------------------------------- names


def read_names(stream: BinaryIO, separator: bytes) -> List[str]:
    """The names of a list, each ended by ``separator``; empty ones do not count. Raises OSError."""
    return [os.fsdecode(name) for name in stream.read().split(separator) if name]


def tree_of(names: Iterable[str], shown: str) -> Node:
    """What a list asks for. ``shown`` is the list's name. Raises NotBelow."""
    root: Node = {}
    bad: List[str] = []
    for name in names:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts:
            bad.append("%s: %s is not a name below SOURCE" % (quote(shown), quote(name)))
            continue
        node = root
        for part in parts:
            node = node.setdefault(part, {})
        node[WHOLE] = {}
    if bad:
        raise NotBelow(bad)
    return root


# --------------------------------------------------------------------------------------------------------- choice


class Choice:
    """What is wanted of one tree. ``missing`` are the names of a list of which there is nothing."""

    def __init__(self, exclusions: Sequence[Exclusion], names: Optional[Node]) -> None:
        self._exclusions = exclusions
        self._names: Node = {WHOLE: {}} if names is None else names
        self.lists = names is not None
        self.missing: List[str] = []

    def of(self, components: Sequence[str], listing: Listing) -> Listing:
        """A directory's listing without what is not wanted."""
        whole, node = self._node(components)
        directories = {name for name, _ in listing.directories}
        if listing.identity is not None:
            there = _names_in(listing) if node else directories
            for name, below in node.items():
                self.missing.extend(_missing("/".join((*components, name)), name in there, name in directories, below))
        above = b"".join(os.fsencode(part) + b"/" for part in components)

        def is_wanted(name: str) -> bool:
            is_directory = name in directories
            if not (whole or (name in node and (is_directory or WHOLE in node[name]))):
                return False
            return not any(exclusion.matches(above + os.fsencode(name), is_directory) for exclusion in self._exclusions)

        return _without(listing, is_wanted)

    def _node(self, components: Sequence[str]) -> Tuple[bool, Node]:
        """Whether all of a directory is wanted, and what of it is named."""
        node = self._names
        whole = WHOLE in node
        for part in components:
            node = node.get(part, {})
            whole = whole or WHOLE in node
        return whole, {name: below for name, below in node.items() if name != WHOLE}


def _names_in(listing: Listing) -> Set[str]:
    files = listing.names.split(b"\0") if listing.stats else []
    found = {os.fsdecode(name) for name in files} | {link.name for link in listing.links}
    for entries in (listing.directories, listing.specials, listing.problems):
        found.update(entry[0] for entry in entries)
    return found


def _missing(path: str, is_there: bool, is_directory: bool, below: Node) -> List[str]:
    """What a list names at or below a path, and is not there; what is below a directory is found there."""
    found = [path] if WHOLE in below and not is_there else []
    if not is_directory:
        for name, node in below.items():
            if name != WHOLE:
                found += _missing(path + "/" + name, False, False, node)
    return found


def _without(listing: Listing, is_wanted: Any) -> Listing:
    names = listing.names.split(b"\0") if listing.stats else []
    kept = [index for index, name in enumerate(names) if is_wanted(os.fsdecode(name))]
    place = {index: number for number, index in enumerate(kept)}
    stats = array("Q")
    stats.frombytes(listing.stats)
    numbers = array("Q", (stats[index * FIELDS + field] for index in kept for field in range(FIELDS)))
    return listing._replace(
        names=b"\0".join(names[index] for index in kept),
        stats=numbers.tobytes(),
        directories=tuple(entry for entry in listing.directories if is_wanted(entry[0])),
        specials=tuple(entry for entry in listing.specials if is_wanted(entry[0])),
        problems=tuple(entry for entry in listing.problems if not entry[0] or is_wanted(entry[0])),
        links=tuple(link for link in listing.links if is_wanted(link.name)),
        twins=tuple(place[index] for index in listing.twins if index in place),
        # How much of what is left out was theirs is not known.
        allocated=listing.allocated if len(kept) == len(names) else min(listing.allocated, sum(numbers[::FIELDS])),
        shared=min(listing.shared, len(kept)),
    )
