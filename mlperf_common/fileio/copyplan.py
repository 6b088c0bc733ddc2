# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What goes where: cp's argument rules, the strict walk, and the plan of a copy. Reads only, writes nothing.

The request is classified once (a file to a name, a tree to a name, anything into a directory), every refusal is
decided here, and what is left is data: after this module nobody asks "is it a directory?" again.

The walk is strict: what cannot be listed or looked at is an error that names it, never an empty directory. It
goes level by level without recursion, with one scandir a directory and at most one stat an entry, because on a
shared filesystem that is the cost. Links are followed; a cycle of links is found by its ancestors.

The plan is compact: 1,000,000 files cost about 55 bytes each, names included; paths are made on demand.

Not promised: that the tree stays as it was seen. Whoever copies compares each file with what the plan saw.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from array import array
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
    overload,
)

NAMED_AT_MOST = 20  # how many names one message spells out; the rest is counted

# A directory changed less than this (nanoseconds) before it was listed may change again within the same tick of
# a coarse clock, its mtime staying the same (ran on ext4 with 4 ms ticks, and whole seconds on some servers).
YOUNG_NS = 2_000_000_000

# How many directories of a chain stay open. The default limit of descriptors is 1,024 and a worker has two
# chains; trees deeper than this are rare and cost a few more opens.
OPEN_AT_MOST = 64

_MASK = (1 << 64) - 1  # times before 1970 and after 2262 do not fit 64 bits with a sign; equality is all we need
FIELDS = 4  # of a file: size, device, inode, mtime


# ---------------------------------------------------------------------------------------------- names in words


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


# --------------------------------------------------------------------------------------------------- refusals


class CopyArgumentError(Exception):
    """A request that is refused before anything is written; one subclass a rule.

    ``lines`` has a line for each problem of that kind, in GNU cp's wording and without a program's name: 20 at
    the most, then how many more there are (``more`` counts those that were not even put into words).
    """

    def __init__(self, lines: Sequence[str], more: int = 0) -> None:
        self.lines = capped(lines, more)
        super().__init__("\n".join(self.lines))


class MissingOperand(CopyArgumentError):
    """No source, or no destination."""


class MissingSource(CopyArgumentError):
    """A source operand that cannot be looked at: absent, empty, a dangling link."""


class OmittedDirectory(CopyArgumentError):
    """A directory among the sources without -r."""


class TargetNotDirectory(CopyArgumentError):
    """Several sources, or -t, and the target is not an existing directory."""


class UnusableDestination(CopyArgumentError):
    """DEST cannot be looked at, or cannot be made where it is asked for (no parent, an empty operand)."""


class NonDirectoryInTheWay(CopyArgumentError):
    """A directory would land on a file, or on a symbolic link below DEST."""


class DirectoryInTheWay(CopyArgumentError):
    """A file would land on a directory."""


class SameFile(CopyArgumentError):
    """A source and its destination are one file or directory."""


class CopyIntoItself(CopyArgumentError):
    """DEST lies inside a source, be it through a followed link."""


class OverwritesSource(CopyArgumentError):
    """A planned destination is, by device and inode, also a planned source."""


class JustCreated(CopyArgumentError):
    """Two sources would land on one name."""


class DestinationExists(CopyArgumentError):
    """Destination files exist and -f was not given."""


class NotRegularDestination(CopyArgumentError):
    """A destination exists and is a FIFO, socket or device."""


class SpecialFiles(CopyArgumentError):
    """FIFOs, sockets or devices among the sources."""


class UnreadableEntries(Exception):
    """Entries of a tree that could not be looked at or listed: all of them, found in one pass.

    ``entries`` is the list of (path, reason), ``lines`` up to 20 of them in words and a count of the rest.
    """

    def __init__(self, entries: Sequence[Tuple[str, str]]) -> None:
        self.entries = list(entries)
        self.lines = capped(["cannot access %s: %s" % (quote(path), reason) for path, reason in self.entries])
        super().__init__("\n".join(self.lines))


def capped(lines: Sequence[str], more: int = 0) -> List[str]:
    """The first 20 of ``lines`` and, where there are more (besides ``more``), a line that counts the rest."""
    shown = list(lines[:NAMED_AT_MOST])
    more += len(lines) - len(shown)
    return shown + (["... and %d more" % more] if more else [])


# ------------------------------------------------------------------------------------------ listing one directory


class Identity(NamedTuple):
    """What tells one directory from another: device and inode, or (overlay renumbers) device and both times."""

    dev: int
    ino: int
    mtime_ns: int
    ctime_ns: int

    def is_same(self, other: "Identity") -> bool:
        """Whether both are one directory; an overlay without xino renumbers directories while we run (ran)."""
        return self[:2] == other[:2] or (self.dev == other.dev and self[2:] == other[2:])


def identity_of(st: os.stat_result) -> Identity:
    """The identity in an fstat's result (never scandir's inode, which differs at mount points)."""
    return Identity(st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns)


class Request(NamedTuple):
    """A directory to list: below the operand ``root``, along ``components``; those at ``links`` are followed.

    ``destination``: names, kinds and inodes are wanted instead of what a source needs.
    """

    root: str
    components: Tuple[str, ...]
    links: Tuple[int, ...] = ()
    destination: bool = False


class Listing(NamedTuple):
    """What a source directory holds, compactly; ``problems`` are (name, reason), the name "" being itself.

    ``names`` is the files' names in byte order, joined by NUL; ``stats`` four 64-bit numbers of each file.
    ``digest`` of all names is there when the directory is young (``YOUNG_NS``).
    """

    identity: Optional[Identity]
    mode: int = 0
    digest: bytes = b""
    names: bytes = b""
    stats: bytes = b""
    directories: Tuple[Tuple[str, bool], ...] = ()
    specials: Tuple[Tuple[str, str], ...] = ()
    problems: Tuple[Tuple[str, str], ...] = ()


class DestinationListing(NamedTuple):
    """What a destination directory holds: for each name its kind (d, f, l, o) and inode; errno if unlistable."""

    identity: Optional[Identity]
    names: bytes = b""
    kinds: bytes = b""
    inodes: bytes = b""
    errno: int = 0
    reason: str = ""


ListDirectories = Callable[[Sequence[Request]], Sequence[Union[Listing, DestinationListing]]]


class DirectoryChain:
    """Directories below an operand, opened one component at a time and kept open between neighbours.

    O_NOFOLLOW guards only the last component of a path (ran), so a swapped directory further up would lead reads
    or writes out of the tree; components opened one by one from the operand's descriptor cannot. It also lifts
    PATH_MAX. ``root_fd`` becomes the chain's own and is closed with it.
    """

    def __init__(self, root_fd: int, flags: int) -> None:
        self._flags = flags | os.O_DIRECTORY | os.O_CLOEXEC
        self._names: List[str] = []
        self._fds: List[int] = [root_fd]

    def open(self, components: Sequence[str], links: Sequence[int] = ()) -> int:
        """The descriptor of the directory along ``components``; valid until the next call.

        A component whose index is in ``links`` may be a symbolic link, any other may not.
        Raises OSError with the component's name.
        """
        depth = self._resume(components)
        while depth < len(components):
            flags = self._flags if depth in links else self._flags | os.O_NOFOLLOW
            fd = os.open(components[depth], flags, dir_fd=self._fds[depth])
            self._names.append(components[depth])
            self._fds.append(fd)
            depth += 1
            self._forget(depth - OPEN_AT_MOST)
        return self._fds[depth]

    def _resume(self, components: Sequence[str]) -> int:
        """Go back to the deepest open ancestor of ``components``; its depth."""
        depth = 0
        while depth < min(len(self._names), len(components)) and self._names[depth] == components[depth]:
            depth += 1
        while self._fds[depth] < 0:
            depth -= 1
        for level in range(depth + 1, len(self._fds)):
            self._forget(level)
        del self._names[depth:], self._fds[depth + 1 :]
        return depth

    def _forget(self, level: int) -> None:
        if level > 0 and self._fds[level] >= 0:
            os.close(self._fds[level])
            self._fds[level] = -1

    def close(self) -> None:
        """Close every descriptor, the root's too."""
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds = []


def open_root(path: str, destination: bool) -> int:
    """A descriptor of a directory operand, links followed; a destination need not be readable. Raises OSError."""
    return os.open(path, (os.O_PATH if destination else os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)


def open_chain(root_fd: int, destination: bool) -> DirectoryChain:
    """A chain from ``root_fd``: in a destination O_PATH, since that need not be readable (open(2))."""
    return DirectoryChain(root_fd, os.O_PATH if destination else os.O_RDONLY)


def list_directory(chain: DirectoryChain, request: Request) -> Union[Listing, DestinationListing]:
    """List one directory; what goes wrong is in the result, never raised."""
    if request.destination:
        return _list_destination(chain, request)
    try:
        return _list_source(chain.open(request.components, request.links))
    except OSError as exc:
        return Listing(None, problems=(("", reason_of(exc)),))


def _list_source(fd: int) -> Listing:
    st = os.fstat(fd)
    young = st.st_mtime_ns > time.time_ns() - YOUNG_NS
    files: List[Tuple[bytes, os.stat_result]] = []
    directories: List[Tuple[str, bool]] = []
    specials: List[Tuple[str, str]] = []
    problems: List[Tuple[str, str]] = []
    everything: List[bytes] = []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if young:
                    everything.append(os.fsencode(entry.name))
                _classify(entry, files, directories, specials, problems)
    except OSError as exc:  # an error half-way through a listing is not the end of the directory
        problems.append(("", reason_of(exc)))
    files.sort()
    numbers = array("Q")
    for _, seen in files:
        numbers.extend((seen.st_size, seen.st_dev, seen.st_ino, seen.st_mtime_ns & _MASK))
    return Listing(
        identity_of(st),
        st.st_mode,
        names_digest(everything) if young else b"",
        b"\0".join(name for name, _ in files),
        numbers.tobytes(),
        tuple(sorted(directories, key=lambda item: os.fsencode(item[0]))),
        tuple(specials),
        tuple(problems),
    )


def _classify(
    entry: "os.DirEntry[str]",
    files: List[Tuple[bytes, os.stat_result]],
    directories: List[Tuple[str, bool]],
    specials: List[Tuple[str, str]],
    problems: List[Tuple[str, str]],
) -> None:
    """Sort one entry into the lists, with no stat for a directory and one for anything else."""
    try:
        link = entry.is_symlink()
        if not link and entry.is_dir(follow_symlinks=False):
            directories.append((entry.name, False))
            return
        st = entry.stat(follow_symlinks=link)
    except OSError as exc:
        dangling = exc.errno == errno.ENOENT and entry.is_symlink()
        problems.append((entry.name, ("dangling symbolic link: " if dangling else "") + reason_of(exc)))
        return
    if stat.S_ISREG(st.st_mode):
        files.append((os.fsencode(entry.name), st))
    elif stat.S_ISDIR(st.st_mode):
        directories.append((entry.name, link))
    else:
        specials.append((entry.name, kind_of(st.st_mode)))


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


def names_digest(names: Iterable[bytes]) -> bytes:
    """A digest of a directory's names in any order, to see later whether they are still the same."""
    import hashlib  # costs 5 ms; only needed for young directories

    return hashlib.sha256(b"\0".join(sorted(names))).digest()


def _list_destination(chain: DirectoryChain, request: Request) -> DestinationListing:
    identity = None
    try:
        place = chain.open(request.components)
        identity = identity_of(os.fstat(place))
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
        try:
            with os.scandir(fd) as entries:
                found = sorted((os.fsencode(e.name), _letter(e), e.inode()) for e in entries)
        finally:
            os.close(fd)
    except OSError as exc:
        return DestinationListing(identity, errno=exc.errno or errno.EIO, reason=reason_of(exc))
    return DestinationListing(
        identity,
        b"\0".join(name for name, _, _ in found),
        "".join(kind for _, kind, _ in found).encode(),
        array("Q", (inode for _, _, inode in found)).tobytes(),
    )


def _letter(entry: "os.DirEntry[str]") -> str:
    if entry.is_symlink():
        return "l"
    if entry.is_dir(follow_symlinks=False):
        return "d"
    return "f" if entry.is_file(follow_symlinks=False) else "o"


def list_serially(requests: Sequence[Request]) -> Sequence[Union[Listing, DestinationListing]]:
    """List directories one after the other in this process: the walk's default."""
    results: List[Union[Listing, DestinationListing]] = []
    chain: Optional[DirectoryChain] = None
    root = None
    for request in requests:
        try:
            if chain is None or root != (request.root, request.destination):
                if chain is not None:
                    chain.close()
                    chain = None
                root = (request.root, request.destination)
                chain = open_chain(open_root(request.root, request.destination), request.destination)
            results.append(list_directory(chain, request))
        except OSError as exc:
            results.append(unlisted(request, exc))
    if chain is not None:
        chain.close()
    return results


def unlisted(request: Request, exc: OSError) -> Union[Listing, DestinationListing]:
    """The result of a request whose operand could not be opened."""
    if request.destination:
        return DestinationListing(None, errno=exc.errno or errno.EIO, reason=reason_of(exc))
    return Listing(None, problems=(("", reason_of(exc)),))


# ------------------------------------------------------------------------------------------------- the walk


class FileEntry(NamedTuple):
    """What the walk saw of one file: its name in its directory, size in bytes, device, inode, mtime (modulo 2^64)."""

    name: str
    size: int
    dev: int
    ino: int
    mtime: int


class Tree:
    """A source operand that is a directory, and where its contents land: ``components`` below the plan's base."""

    __slots__ = ("source", "shown", "components", "root")

    def __init__(self, source: str, shown: str, components: Tuple[str, ...]) -> None:
        self.source = source  # absolute, never normalised
        self.shown = shown  # as the user gave it
        self.components = components
        self.root = Directory(self, None, "", False)


class Directory:
    """A directory of a walked tree: where it hangs, what identifies it, its files (compact) and children.

    ``existing`` is None where DEST has no such directory; else the names in it that the plan will replace.
    """

    __slots__ = (
        "tree",
        "parent",
        "name",
        "followed",
        "depth",
        "identity",
        "mode",
        "digest",
        "names",
        "stats",
        "children",
        "destination",
        "existing",
    )

    def __init__(self, tree: Tree, parent: Optional["Directory"], name: str, followed: bool) -> None:
        self.tree = tree
        self.parent = parent
        self.name = name
        self.followed = followed
        self.depth = 0 if parent is None else parent.depth + 1
        self.identity = Identity(0, 0, 0, 0)
        self.mode = 0
        self.digest = b""
        self.names = b""
        self.stats = array("Q")
        self.children: List[Directory] = []
        self.destination: Optional[Identity] = None
        self.existing: Optional[Set[bytes]] = None

    def fill(self, listing: Listing, identity: Identity) -> None:
        """Take what a listing found."""
        self.identity, self.mode, self.digest = identity, listing.mode, listing.digest
        self.names = listing.names
        self.stats = array("Q")
        self.stats.frombytes(listing.stats)
        self.children = [Directory(self.tree, self, name, followed) for name, followed in listing.directories]

    def lineage(self) -> List["Directory"]:
        """From the tree's root down to this directory."""
        line: List[Directory] = []
        at: Optional[Directory] = self
        while at is not None:
            line.append(at)
            at = at.parent
        return line[::-1]

    def components(self) -> Tuple[str, ...]:
        """The names from the tree's root, which has none, down to this directory."""
        return tuple(d.name for d in self.lineage()[1:])

    def request(self) -> Request:
        """The request that lists this directory."""
        line = self.lineage()[1:]
        links = tuple(level for level, directory in enumerate(line) if directory.followed)
        return Request(self.tree.source, tuple(d.name for d in line), links)

    def path(self) -> str:
        """Its absolute path, for messages and for ``CopyPlan.files``; it may pass PATH_MAX."""
        return os.path.join(self.tree.source, *self.components())

    def shown(self, name: str = "") -> str:
        """The path, or that of an entry, as the user gave the operand."""
        parts = [*self.components(), name] if name else self.components()
        return os.path.join(self.tree.shown, *parts)

    def landing(self) -> Tuple[str, ...]:
        """The names from the plan's base down to where this directory lands."""
        return self.tree.components + self.components()

    def count(self) -> int:
        """How many files it holds."""
        return len(self.stats) // FIELDS

    def sizes(self) -> Sequence[int]:
        """The sizes of its files in bytes."""
        return self.stats[::FIELDS]

    def file_names(self) -> List[bytes]:
        """Its files' names in byte order."""
        return self.names.split(b"\0") if self.count() else []

    def files(self) -> Iterator[FileEntry]:
        """Its files in byte order of their names."""
        for index, name in enumerate(self.file_names()):
            yield FileEntry(os.fsdecode(name), *self.stats[index * FIELDS : (index + 1) * FIELDS])


class TreeProblems:
    """What a walk could not take: unreadable entries and special files, as (path, reason or kind)."""

    def __init__(self) -> None:
        self.unreadable: List[Tuple[str, str]] = []
        self.specials: List[Tuple[str, str]] = []

    def raise_any(self, skip_special: bool) -> None:
        """Raise UnreadableEntries or, unless they are to be skipped, SpecialFiles."""
        if self.unreadable:
            raise UnreadableEntries(self.unreadable)
        if self.specials and not skip_special:
            raise SpecialFiles([SPECIAL % kind % quote(path) for path, kind in self.specials])


def walk(trees: Sequence[Tree], list_directories: ListDirectories) -> TreeProblems:
    """Fill the trees level by level; all that cannot be taken is in the result."""
    problems = TreeProblems()
    level = [tree.root for tree in trees]
    while level:
        following: List[Directory] = []
        for directory, listing in zip(level, list_directories([d.request() for d in level])):
            if isinstance(listing, Listing):
                _take(directory, listing, problems, following)
        level = following
    problems.unreadable.sort(key=lambda item: os.fsencode(item[0]))
    problems.specials.sort(key=lambda item: os.fsencode(item[0]))
    return problems


def _take(directory: Directory, listing: Listing, problems: TreeProblems, following: List[Directory]) -> None:
    problems.unreadable.extend((directory.shown(name), reason) for name, reason in listing.problems)
    problems.specials.extend((directory.shown(name), kind) for name, kind in listing.specials)
    if listing.identity is None:
        return
    if directory.followed and _is_cycle(directory, listing.identity):
        problems.unreadable.append((directory.shown(), "cyclic symbolic link: it leads to a directory above itself"))
        return
    directory.fill(listing, listing.identity)
    following.extend(directory.children)


def _is_cycle(directory: Directory, identity: Identity) -> bool:
    at = directory.parent
    while at is not None:
        if at.identity[:2] == identity[:2]:
            return True
        at = at.parent
    return False


def breadth_first(trees: Iterable[Tree]) -> List[Directory]:
    """Every directory of the trees, shallowest first."""
    level = [tree.root for tree in trees]
    found: List[Directory] = []
    while level:
        found.extend(level)
        level = [child for directory in level for child in directory.children]
    return found


class TreeEntries(NamedTuple):
    """The relative paths of a tree: files in byte order, directories shallowest first; the root is not among them."""

    files: List[str]
    directories: List[str]


def list_relative_entries(
    root: str,
    skip_special: bool = False,
    list_directories: ListDirectories = list_serially,
    skipped: Optional[List[Tuple[str, str]]] = None,
) -> TreeEntries:
    """Walk ``root`` once, links followed; its files and directories as paths relative to it.

    ``skipped`` receives the (path, kind) of special files that ``skip_special`` leaves out.
    Raises UnreadableEntries with everything that could not be looked at or listed, a missing root and cycles of
    links included; SpecialFiles.
    """
    tree = Tree(absolute(root), root, ())
    if not root:
        raise UnreadableEntries([("", os.strerror(errno.ENOENT))])
    problems = walk([tree], list_directories)
    problems.raise_any(skip_special)
    if skipped is not None:
        skipped.extend(problems.specials)
    files: List[str] = []
    directories: List[str] = []
    for directory in breadth_first([tree]):
        prefix = "/".join(directory.components())
        if prefix:
            directories.append(prefix)
            prefix += "/"
        files.extend(prefix + os.fsdecode(name) for name in directory.file_names())
    files.sort(key=os.fsencode)
    directories.sort(key=depth_and_name)
    return TreeEntries(files, directories)


def list_relative_files(
    root: str,
    skip_special: bool = False,
    list_directories: ListDirectories = list_serially,
    skipped: Optional[List[Tuple[str, str]]] = None,
) -> List[str]:
    """The relative paths of all files below ``root``, in byte order; as ``list_relative_entries``."""
    return list_relative_entries(root, skip_special, list_directories, skipped).files


def depth_and_name(path: str) -> Tuple[int, bytes]:
    """Sorts paths shallowest first, then by their bytes (str order differs for undecodable names)."""
    return path.count("/"), os.fsencode(path)


def absolute(path: str) -> str:
    """The working directory joined with ``path``, not normalised: ``l/..`` is the kernel's to resolve."""
    return os.path.join(os.getcwd(), path)


# ------------------------------------------------------------------------------------------------- the plan


class LooseFile(NamedTuple):
    """A source operand that is a file: its path, the name that it gets in the base, what was seen of it."""

    source: str
    shown: str
    name: str
    entry: FileEntry
    standing: Optional[os.stat_result]  # what it will replace


class Base(NamedTuple):
    """The existing directory in which everything lands: the target, or the parent of a new name."""

    path: str
    shown: str
    identity: Identity


class CopyPlan(NamedTuple):
    """What a copy will do.

    ``files``: (absolute source, absolute destination, size in bytes), in byte order of the destination.
    ``directories``: every destination directory that the copy needs, parents of files and empty ones alike,
    shallowest first. The rest is what the copier works from: the base, trees and loose files, and the
    special files left out as (path, kind).
    """

    files: Sequence[Tuple[str, str, int]]
    directories: Sequence[str]
    base: Base = Base("", "", Identity(0, 0, 0, 0))
    trees: Sequence[Tree] = ()
    loose: Sequence[LooseFile] = ()
    skipped: Sequence[Tuple[str, str]] = ()

    def size(self) -> int:
        """The bytes of all its files."""
        trees = sum(sum(directory.sizes()) for directory in breadth_first(self.trees))
        return trees + sum(file.entry.size for file in self.loose)


class OnDemand(Sequence[Any]):
    """A sequence that makes its items each time it is read, so that a plan of millions stays small.

    ``make`` gives the items, ``count`` their number. The first access by index keeps them all.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], count: int) -> None:
        self._make = make
        self._count = count
        self._kept: Optional[List[Any]] = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make() if self._kept is None else self._kept)

    def __getitem__(self, index: Any) -> Any:
        if self._kept is None:
            self._kept = list(self._make())
        return self._kept[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, tuple, OnDemand)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


Place = Tuple[bytes, str, str, int, Optional[Directory]]  # sort key, source, destination, size, what is inside


def planned_files(base: Base, trees: Sequence[Tree], loose: Sequence[LooseFile]) -> Iterator[Tuple[str, str, int]]:
    """The plan's files in byte order of their destinations, without sorting them all.

    A directory's files and children merge by name, a child's with its slash: no file's name can sort between
    two paths that begin with the same ``child/``.
    """
    top = [(os.fsencode(f.name), f.source, os.path.join(base.path, f.name), f.entry.size, None) for f in loose]
    for tree in trees:
        if tree.components:
            name = tree.components[0]
            top.append((os.fsencode(name) + b"/", tree.source, os.path.join(base.path, name), 0, tree.root))
        else:
            top.extend(_places(tree.root, tree.source, base.path))
    stack = [iter(sorted(top, key=lambda place: place[0]))]
    while stack:
        place = next(stack[-1], None)
        if place is None:
            stack.pop()
        elif place[4] is None:
            yield place[1:4]
        else:
            stack.append(iter(_places(place[4], place[1], place[2])))


def _places(directory: Directory, source: str, destination: str) -> List[Place]:
    found: List[Place] = [
        (os.fsencode(f.name), os.path.join(source, f.name), os.path.join(destination, f.name), f.size, None)
        for f in directory.files()
    ]
    for child in directory.children:
        key = os.fsencode(child.name) + b"/"
        found.append((key, os.path.join(source, child.name), os.path.join(destination, child.name), 0, child))
    found.sort(key=lambda place: place[0])
    return found


def planned_directories(base: Base, trees: Sequence[Tree], loose: Sequence[LooseFile]) -> List[str]:
    """Every destination directory that the copy needs, shallowest first."""
    paths = {os.path.join(base.path, *directory.landing()) for directory in breadth_first(trees)}
    if loose:
        paths.add(base.path)
    return sorted(paths, key=depth_and_name)


class Operand(NamedTuple):
    """A source operand: as given, what stat says of it, the name that it gets ("": its contents land directly)."""

    shown: str
    st: os.stat_result
    name: str = ""
    standing: Optional[os.stat_result] = None  # what is there already, where it lands

    def is_tree(self) -> bool:
        """Whether it is a directory, links followed."""
        return stat.S_ISDIR(self.st.st_mode)

    def landing(self, base: Base) -> str:
        """Where it lands, for messages, as cp would show it."""
        return os.path.join(base.shown, self.name or ".")


class Refusals:
    """The problems found so far, by rule; ``raise_first`` raises the first kind that has any, all of its kind."""

    ORDER = (
        MissingSource,
        OmittedDirectory,
        SpecialFiles,
        SameFile,
        JustCreated,
        CopyIntoItself,
        OverwritesSource,
        NonDirectoryInTheWay,
        DirectoryInTheWay,
        NotRegularDestination,
        UnusableDestination,
        DestinationExists,
    )

    def __init__(self) -> None:
        self._lines: Dict[Any, List[str]] = {}
        self._more: Dict[Any, int] = {}

    def add(self, rule: Any, text: str, *paths: str) -> None:
        """Note a problem: ``text`` with a %s for each path. Only those that will be shown are put into words."""
        lines = self._lines.setdefault(rule, [])
        if len(lines) < NAMED_AT_MOST:
            lines.append(text % tuple(quote(path) for path in paths))
        else:
            self._more[rule] = self._more.get(rule, 0) + 1

    def drop(self, rule: Any) -> None:
        """Forget the problems of one rule."""
        self._lines.pop(rule, None)

    def raise_first(self) -> None:
        """Raise the refusal that comes first in ``ORDER``, if there is one."""
        for rule in self.ORDER:
            if rule in self._lines:
                raise rule(self._lines[rule], self._more.get(rule, 0))


INTO_ITSELF = "cannot copy a directory, %s, into itself, %s"
OVER_FILE = "cannot overwrite non-directory %s with directory %s"
OVER_DIRECTORY = "cannot overwrite directory %s with non-directory"
SAME_FILE = "%s and %s are the same file"
EXISTS = "cannot create regular file %s: File exists (-f replaces it)"
OVER_SOURCE = "cannot overwrite source %s with %s"
SPECIAL = "%%s is a %s, neither a regular file nor a directory (--skip-special leaves it out)"
NOT_REGULAR = "cannot overwrite %s: not a regular file"


def _examine(sources: Sequence[str], recursive: bool) -> List[Operand]:
    """Look at every source operand; refuse what is missing, then directories without -r."""
    refusals = Refusals()
    operands = []
    for source in sources:
        try:
            st = os.stat(source)
        except OSError as exc:
            refusals.add(MissingSource, "cannot stat %s: " + reason_of(exc).replace("%", "%%"), source)
            continue
        operands.append(Operand(source, st))
        if stat.S_ISDIR(st.st_mode) and not recursive:
            refusals.add(OmittedDirectory, "-r not specified; omitting directory %s", source)
    refusals.raise_first()
    return operands


def _base(path: str) -> Base:
    """``path`` as the base; "" is the working directory, as the parent of a name without a slash."""
    return Base(absolute(path) if path else os.getcwd(), path, identity_of(os.stat(path or ".")))


def _target(destination: str, option: bool) -> Base:
    """The directory that several sources, or those of -t, go into."""
    words = "target directory %s: %s" if option else "target %s: %s"
    try:
        if not destination:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        base = _base(destination)
        if not stat.S_ISDIR(os.stat(destination).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as exc:
        raise TargetNotDirectory([words % (quote(destination), reason_of(exc))]) from exc
    return base


def entry_name(source: str) -> str:
    """The name that ``source`` gets in a directory: "" for ``.``, ``..`` and ``/``, whose contents go there."""
    name = os.path.basename(source.rstrip("/"))
    return "" if name in (".", "..") else name


def _single(operand: Operand, destination: str, no_target_directory: bool) -> Tuple[Base, Operand]:
    """cp's rule for one source: into a directory that exists, else the name itself."""
    try:
        st: Optional[os.stat_result] = os.stat(destination)
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ELOOP) or not destination:
            raise _unusable(operand, destination, exc) from exc
        st = None
    if st is None or not stat.S_ISDIR(st.st_mode):
        return _new_name(operand, destination)
    if not no_target_directory:
        return _base(destination), operand._replace(name=entry_name(operand.shown))
    if not operand.is_tree():
        raise DirectoryInTheWay([OVER_DIRECTORY % quote(destination)])
    if stat.S_ISLNK(os.lstat(destination).st_mode):  # -T takes DEST as the name that it is, as cp does
        raise NonDirectoryInTheWay([OVER_FILE % (quote(destination), quote(operand.shown))])
    return _base(destination), operand


def _unusable(operand: Operand, destination: str, exc: OSError) -> UnusableDestination:
    if destination and exc.errno != errno.ENOENT:
        return UnusableDestination(["cannot stat %s: %s" % (quote(destination), reason_of(exc))])
    what = "directory" if operand.is_tree() else "regular file"
    return UnusableDestination(["cannot create %s %s: %s" % (what, quote(destination), reason_of(exc))])


def _new_name(operand: Operand, destination: str) -> Tuple[Base, Operand]:
    """DEST is no directory: its parent is the base, its last component the name."""
    parent, name = os.path.split(destination.rstrip("/"))
    try:
        if name in ("", ".", ".."):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        base = _base(parent)
        if destination.endswith("/") and not operand.is_tree():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as exc:
        what = "directory" if operand.is_tree() else "regular file"
        line = "cannot create %s %s: %s" % (what, quote(destination), reason_of(exc))
        raise UnusableDestination([line]) from exc
    return base, operand._replace(name=name)


def _resolve(
    sources: Sequence[str], destination: str, recursive: bool, into_directory: bool, no_target_directory: bool
) -> Tuple[Base, List[Operand]]:
    """Classify the request and look at its operands: what goes under which name of which directory."""
    if not sources:
        raise MissingOperand(["missing file operand"])
    if no_target_directory and len(sources) > 1:
        raise MissingOperand(["extra operand %s" % quote(sources[1])])
    if into_directory or len(sources) > 1:
        base = _target(destination, into_directory)
        operands = [o._replace(name=entry_name(o.shown)) for o in _examine(sources, recursive)]
        return base, operands
    base, operand = _single(_examine(sources, recursive)[0], destination, no_target_directory)
    return base, [operand]


def _ancestors(path: str) -> Set[Tuple[int, int]]:
    """Device and inode of the directory ``path`` and of all above it, up to the root, whose parent is itself."""
    found: Set[Tuple[int, int]] = set()
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            identity = identity_of(os.fstat(fd))[:2]
            if identity in found:
                return found
            found.add(identity)
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = above
    finally:
        os.close(fd)


def _standing(base: Base, name: str) -> Optional[os.stat_result]:
    """What stands at ``name`` in the base, links not followed; None if nothing does."""
    try:
        return os.lstat(os.path.join(base.path, name))
    except FileNotFoundError:
        return None


def _leads_to(path: str, standing: os.stat_result, seen: Tuple[int, int]) -> bool:
    """Whether what stands at ``path`` is, or is a link to, the file ``seen`` (device, inode)."""
    if stat.S_ISLNK(standing.st_mode):
        try:
            standing = os.stat(path)
        except OSError:  # a link that leads nowhere leads to no source
            return False
    return (standing.st_dev, standing.st_ino) == seen


def _check_landings(base: Base, operands: Sequence[Operand], refusals: Refusals) -> List[Operand]:
    """Each operand against what stands where it lands (noted), against the others, and against being above it."""
    above = _ancestors(base.path)
    taken: Set[str] = set()
    checked = [operand._replace(standing=_standing(base, operand.name or ".")) for operand in operands]
    for operand in checked:
        landing = operand.landing(base)
        if operand.name in taken:
            refusals.add(JustCreated, "will not overwrite just-created %s with %s", landing, operand.shown)
        taken.add(operand.name)
        _check_standing(base, operand, refusals)
        if operand.is_tree() and (operand.st.st_dev, operand.st.st_ino) in above:
            refusals.add(CopyIntoItself, INTO_ITSELF, operand.shown, landing)
    return checked


def _check_standing(base: Base, operand: Operand, refusals: Refusals) -> None:
    standing = operand.standing
    if standing is None:
        return
    landing = operand.landing(base)
    path = os.path.join(base.path, operand.name)
    if _leads_to(path, standing, (operand.st.st_dev, operand.st.st_ino)):
        if not (operand.is_tree() and stat.S_ISLNK(standing.st_mode)):
            refusals.add(SameFile, SAME_FILE, operand.shown, landing)
    if operand.is_tree():
        if not stat.S_ISDIR(standing.st_mode):
            refusals.add(NonDirectoryInTheWay, OVER_FILE, landing, operand.shown)
    elif stat.S_ISDIR(standing.st_mode) or os.path.isdir(path):
        refusals.add(DirectoryInTheWay, OVER_DIRECTORY, landing)
    elif not stat.S_ISREG(standing.st_mode) and not stat.S_ISLNK(standing.st_mode):
        refusals.add(NotRegularDestination, NOT_REGULAR, landing)


def validate_copy_args(
    sources: Sequence[str],
    destination: str,
    recursive: bool = True,
    into_directory: bool = False,
    no_target_directory: bool = False,
) -> None:
    """Apply cp's rules to the operands, without walking anything.

    ``into_directory``: as ``cp -t``; ``no_target_directory``: as ``cp -T``.
    Raises the subclass of CopyArgumentError whose rule is broken, with all problems of that kind.
    """
    base, operands = _resolve(sources, destination, recursive, into_directory, no_target_directory)
    refusals = Refusals()
    _check_landings(base, operands, refusals)
    refusals.raise_first()


def plan_copy_operations(
    sources: Sequence[str],
    destination: str,
    recursive: bool = True,
    into_directory: bool = False,
    no_target_directory: bool = False,
    force: bool = False,
    skip_special: bool = False,
    list_directories: ListDirectories = list_serially,
) -> CopyPlan:
    """Plan the copy that ``cp -rL SOURCES DESTINATION`` would make, or refuse it whole. Reads only.

    ``force``: existing files are replaced; without it each is a refusal. ``skip_special``: FIFOs, sockets and
    devices are left out and listed in ``skipped``. Raises CopyArgumentError's subclasses; UnreadableEntries.
    """
    base, operands = _resolve(sources, destination, recursive, into_directory, no_target_directory)
    refusals = Refusals()
    operands = _check_landings(base, operands, refusals)
    operands, skipped = _without_specials(operands, skip_special, refusals)
    refusals.raise_first()

    trees = [_tree(operand) for operand in operands if operand.is_tree()]
    problems = walk(trees, list_directories)
    _check_nesting(base, operands, trees, refusals)
    refusals.raise_first()
    problems.raise_any(skip_special)

    loose = [_loose(operand) for operand in operands if not operand.is_tree()]
    _DestinationCheck(base, trees, loose, refusals).run(list_directories)
    if force:
        refusals.drop(DestinationExists)
    refusals.raise_first()
    count = len(loose) + sum(d.count() for d in breadth_first(trees))
    files = OnDemand(lambda: planned_files(base, trees, loose), count)
    return CopyPlan(files, planned_directories(base, trees, loose), base, trees, loose, skipped + problems.specials)


def _without_specials(
    operands: Sequence[Operand], skip_special: bool, refusals: Refusals
) -> Tuple[List[Operand], List[Tuple[str, str]]]:
    """The operands that are files or directories, and the others as (path, kind)."""
    kept, skipped = [], []
    for operand in operands:
        if operand.is_tree() or stat.S_ISREG(operand.st.st_mode):
            kept.append(operand)
            continue
        skipped.append((operand.shown, kind_of(operand.st.st_mode)))
        if not skip_special:
            refusals.add(SpecialFiles, SPECIAL % skipped[-1][1], operand.shown)
    return kept, skipped


def _tree(operand: Operand) -> Tree:
    tree = Tree(absolute(operand.shown), operand.shown, (operand.name,) if operand.name else ())
    if operand.standing is not None:
        tree.root.existing = set()
    return tree


def _loose(operand: Operand) -> LooseFile:
    st = operand.st
    entry = FileEntry(operand.name, st.st_size, st.st_dev, st.st_ino, st.st_mtime_ns & _MASK)
    return LooseFile(absolute(operand.shown), operand.shown, operand.name, entry, operand.standing)


def _check_nesting(base: Base, operands: Sequence[Operand], trees: Sequence[Tree], refusals: Refusals) -> None:
    """What only the walk can tell: a followed link to DEST or above it, contents that meet another operand."""
    above = _ancestors(base.path)
    taken = {operand.name for operand in operands if operand.name}
    for tree in trees:
        if tree.components:
            continue
        for name in [child.name for child in tree.root.children] + [f.name for f in tree.root.files()]:
            if name in taken:
                path = os.path.join(base.shown, name)
                refusals.add(JustCreated, "will not overwrite just-created %s with %s", path, tree.root.shown(name))
    for directory in breadth_first(trees):
        if directory.parent is not None and directory.identity[:2] in above:
            landing = os.path.join(base.shown, *directory.landing())
            refusals.add(CopyIntoItself, INTO_ITSELF, directory.shown(), landing)


class _DestinationCheck:
    """The plan against what DEST holds already: one listing for each of its directories that the plan meets."""

    def __init__(self, base: Base, trees: Sequence[Tree], loose: Sequence[LooseFile], refusals: Refusals) -> None:
        self._base = base
        self._trees = trees
        self._loose = loose
        self._refusals = refusals
        self._directories = {d.identity[:2] for d in breadth_first(trees)}
        self._inodes: Set[int] = set()

    def run(self, list_directories: ListDirectories) -> None:
        """Fill ``destination`` and ``existing`` of the directories that stand already; note what is in the way."""
        for file in self._loose:
            self._check_loose(file)
        level = [tree.root for tree in self._trees if tree.root.existing is not None]
        while level:
            requests = [Request(self._base.path, d.landing(), (), True) for d in level]
            following: List[Directory] = []
            for directory, listing in zip(level, list_directories(requests)):
                if isinstance(listing, DestinationListing):
                    following.extend(self._compare(directory, listing))
            level = following

    def _shown(self, directory: Directory, name: str = "") -> str:
        return os.path.join(self._base.shown, *directory.landing(), *([name] if name else []))

    def _check_loose(self, file: LooseFile) -> None:
        if file.standing is None:
            return
        shown = os.path.join(self._base.shown, file.name)
        self._refusals.add(DestinationExists, EXISTS, shown)
        if stat.S_ISREG(file.standing.st_mode) and self._is_source(file.standing):
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, file.shown)

    def _compare(self, directory: Directory, listing: DestinationListing) -> List[Directory]:
        shown = self._shown(directory)
        if listing.identity is None or listing.errno not in (0, errno.EACCES):
            reason = listing.reason.replace("%", "%%")
            self._refusals.add(UnusableDestination, "cannot access %s: " + reason, shown)
            return []
        directory.destination, directory.existing = listing.identity, set()
        if listing.identity[:2] == directory.identity[:2]:
            self._refusals.add(SameFile, SAME_FILE, directory.shown(), shown)
        elif listing.identity[:2] in self._directories:
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, directory.shown())
        found = self._asked(directory) if listing.errno else _found(listing)
        return self._meet(directory, found)

    def _meet(self, directory: Directory, found: Iterable[Tuple[bytes, str, int]]) -> List[Directory]:
        """Sort out the names that are both planned and there; the directories to go on with."""
        following = []
        children = {os.fsencode(child.name): child for child in directory.children}
        files = set(directory.file_names())
        for name, kind, inode in found:
            child = children.get(name)
            if child is not None and kind == "d":
                following.append(child)
            elif child is not None:
                self._refusals.add(NonDirectoryInTheWay, OVER_FILE, self._shown(child), child.shown())
            elif name in files:
                self._meet_file(directory, name, kind, inode)
        return following

    def _meet_file(self, directory: Directory, name: bytes, kind: str, inode: int) -> None:
        text = os.fsdecode(name)
        shown = self._shown(directory, text)
        if kind == "d":
            self._refusals.add(DirectoryInTheWay, OVER_DIRECTORY, shown)
        elif kind == "o":
            self._refusals.add(NotRegularDestination, NOT_REGULAR, shown)
        else:
            self._refusals.add(DestinationExists, EXISTS, shown)
            if directory.existing is not None:
                directory.existing.add(name)
            if kind == "l" or inode in self._source_inodes():
                self._look_closer(directory, text, shown, kind)

    def _look_closer(self, directory: Directory, name: str, shown: str, kind: str) -> None:
        """A link, or an inode number that a source has too: is it a source?"""
        try:
            st = self._stat(directory, name, follow=kind == "l")
        except OSError:  # a dangling link, or gone by now: no source either way
            return
        if stat.S_ISDIR(st.st_mode):
            self._refusals.add(DirectoryInTheWay, OVER_DIRECTORY, shown)
        planned = next(f for f in directory.files() if f.name == name)
        if (st.st_dev, st.st_ino) == (planned.dev, planned.ino):
            self._refusals.add(SameFile, SAME_FILE, directory.shown(name), shown)
        elif kind != "l" and self._is_source(st):
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, directory.shown(name))

    def _stat(self, directory: Directory, name: str, follow: bool) -> os.stat_result:
        chain = open_chain(open_root(self._base.path, True), True)
        try:
            return os.stat(name, dir_fd=chain.open(directory.landing()), follow_symlinks=follow)
        finally:
            chain.close()

    def _asked(self, directory: Directory) -> List[Tuple[bytes, str, int]]:
        """A directory that may be written but not listed (0733) is asked for each planned name."""
        found = []
        names = directory.file_names() + [os.fsencode(child.name) for child in directory.children]
        for name in names:
            try:
                st = self._stat(directory, os.fsdecode(name), follow=False)
            except FileNotFoundError:
                continue
            found.append((name, _letter_of(st.st_mode), st.st_ino))
        return found

    def _source_inodes(self) -> Set[int]:
        if not self._inodes:
            self._inodes = {file.entry.ino for file in self._loose}
            for directory in breadth_first(self._trees):
                self._inodes.update(directory.stats[2::FIELDS])
        return self._inodes

    def _is_source(self, st: os.stat_result) -> bool:
        """Whether a file is also a planned source. The inodes sift; few get past them."""
        if st.st_ino not in self._source_inodes():
            return False
        seen = (st.st_dev, st.st_ino)
        if any((f.entry.dev, f.entry.ino) == seen for f in self._loose):
            return True
        return any(
            (f.dev, f.ino) == seen
            for d in breadth_first(self._trees)
            if st.st_ino in d.stats[2::FIELDS]
            for f in d.files()
        )


def _found(listing: DestinationListing) -> Iterator[Tuple[bytes, str, int]]:
    inodes = array("Q")
    inodes.frombytes(listing.inodes)
    names = listing.names.split(b"\0") if inodes else []
    return zip(names, listing.kinds.decode(), inodes)


def _letter_of(mode: int) -> str:
    return {stat.S_IFLNK: "l", stat.S_IFDIR: "d", stat.S_IFREG: "f"}.get(stat.S_IFMT(mode), "o")
