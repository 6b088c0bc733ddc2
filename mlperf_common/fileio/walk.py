# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The strict walk: what a tree holds, seen by reading only.

Strict: what cannot be listed or looked at is an error that names it, never an empty directory. It goes level by
level without recursion, with one scandir a directory and at most one stat an entry, because on a shared
filesystem that is the cost. Links are followed unless ``Look`` says otherwise; a cycle of links is found by its
ancestors.

What it finds is compact: 1,000,000 files cost about 55 bytes each, names included; paths are made on demand.

Not promised: that the tree stays as it was seen.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from array import array
from typing import AbstractSet, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from mlperf_common.fileio.words import kind_of, reason_of

# A directory changed less than this (nanoseconds) before it was listed may change again within the same tick of
# a coarse clock, its mtime staying the same (ran on ext4 with 4 ms ticks, and whole seconds on some servers).
YOUNG_NS = 2_000_000_000

# How many directories of a chain stay open. The default limit of descriptors is 1,024 and a worker has two
# chains; trees deeper than this are rare and cost a few more opens.
OPEN_AT_MOST = 64

TIME_MASK = (1 << 64) - 1  # times before 1970 and after 2262 do not fit 64 bits with a sign; equality is all we need
FIELDS = 4  # of a file: size, device, inode, mtime
FOREIGN = 1 << 63  # in a device number: another node's. Two of them still tell two filesystems from each other.


# ------------------------------------------------------------------------------------------ listing one directory


class Identity(NamedTuple):
    """What tells one directory from another: device and inode, or (overlay renumbers) device and both times.

    Device 0, which no file has, and any with ``FOREIGN`` in it are of another node: their numbers say nothing here.
    """

    dev: int
    ino: int
    mtime_ns: int
    ctime_ns: int

    def is_same(self, other: Identity) -> bool:
        """Whether both are one directory; an overlay without xino renumbers directories while we run (ran)."""
        return is_device(self.dev, other.dev) and (self.ino == other.ino or self[2:] == other[2:])


def is_device(one: int, other: int) -> bool:
    """Whether two device numbers are, or may be (one is another node's), those of one device."""
    return one == other or not one or not other or bool((one | other) & FOREIGN)


def identity_of(st: os.stat_result) -> Identity:
    """The identity in an fstat's result (never scandir's inode, which differs at mount points)."""
    return Identity(st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns)


class Look(NamedTuple):
    """How a source is looked at.

    ``follow``: links are taken for what they lead to, else as links. ``device``: directories of any other one are
    not entered; None: all are. ``names``: every directory gets a digest of its names, whatever its age. ``twins``:
    files that may have another name are to be known.
    """

    follow: bool = True
    device: Optional[int] = None
    names: bool = False
    twins: bool = False


FOLLOW = Look()


class Request(NamedTuple):
    """A directory to list: below the operand ``root``, along ``components``; those at ``links`` are followed.

    ``destination``: names, kinds and inodes are wanted instead of what a source needs; with ``times`` also the sizes
    and times of files.
    """

    root: str
    components: Tuple[str, ...]
    links: Tuple[int, ...] = ()
    destination: bool = False
    look: Look = FOLLOW
    times: bool = False


class LinkEntry(NamedTuple):
    """A symbolic link that is to be copied as one: its name; device and inode where it has another name, else 0."""

    name: str
    dev: int
    ino: int


class Listing(NamedTuple):
    """What a source directory holds, compactly; ``problems`` are (name, reason), the name "" being itself.

    ``names`` is the files' names in byte order, joined by NUL; ``stats`` four 64-bit numbers of each file; ``twins``
    the positions of those that may have another name, ``shared`` how many have one; ``allocated`` the bytes that all
    of them occupy.
    ``digest`` of all names is there when the directory is young (``YOUNG_NS``) or it was asked for.
    """

    identity: Optional[Identity]
    mode: int = 0
    digest: bytes = b""
    names: bytes = b""
    stats: bytes = b""
    directories: Tuple[Tuple[str, bool], ...] = ()
    specials: Tuple[Tuple[str, str], ...] = ()
    problems: Tuple[Tuple[str, str], ...] = ()
    owner: Tuple[int, int] = (0, 0)
    atime_ns: int = 0
    links: Tuple[LinkEntry, ...] = ()
    twins: Tuple[int, ...] = ()
    allocated: int = 0
    shared: int = 0

    def entries(self) -> int:
        """How many files, directories and links."""
        return len(self.stats) // (8 * FIELDS) + len(self.directories) + len(self.links)


class DestinationListing(NamedTuple):
    """What a destination directory holds: for each name its kind (d, f, l, o) and inode; errno if unlistable.

    ``times``: if they were asked for, size and mtime of each, two 64-bit numbers; zeros for what is no file.
    """

    identity: Optional[Identity]
    names: bytes = b""
    kinds: bytes = b""
    inodes: bytes = b""
    errno: int = 0
    reason: str = ""
    times: bytes = b""


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

    def open_listed(self, components: Sequence[str], links: Sequence[int], identity: Identity) -> int:
        """The same of a directory that was listed: another that has taken its place is an OSError (ESTALE)."""
        fd = self.open(components, links)
        if not identity_of(os.fstat(fd)).is_same(identity):
            raise OSError(errno.ESTALE, "another directory has taken its place since it was listed")
        return fd

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


@contextlib.contextmanager
def opened(request: Request) -> Iterator[int]:
    """A directory's descriptor for the time of a with block; where many are opened, a chain is kept. Raises OSError."""
    chain = open_chain(open_root(request.root, request.destination), request.destination)
    try:
        yield chain.open(request.components, request.links)
    finally:
        chain.close()


def list_directory(chain: DirectoryChain, request: Request) -> Union[Listing, DestinationListing]:
    """List one directory; what goes wrong is in the result, never raised."""
    if request.destination:
        return _list_destination(chain, request)
    try:
        return _list_source(chain.open(request.components, request.links), request.look)
    except OSError as exc:
        return Listing(None, problems=(("", reason_of(exc)),))


def _list_source(fd: int, look: Look) -> Listing:
    st = os.fstat(fd)
    found = _Found(look)
    if look.device in (None, st.st_dev):
        found.read(fd, look.names or st.st_mtime_ns > time.time_ns() - YOUNG_NS)
    found.files.sort()
    numbers = array("Q")
    for _, seen in found.files:
        numbers.extend((seen.st_size, seen.st_dev, seen.st_ino, seen.st_mtime_ns & TIME_MASK))
    return Listing(
        identity_of(st),
        st.st_mode,
        found.digest,
        b"\0".join(name for name, _ in found.files),
        numbers.tobytes(),
        tuple(sorted(found.directories, key=lambda item: os.fsencode(item[0]))),
        tuple(found.specials),
        tuple(found.problems),
        (st.st_uid, st.st_gid),
        st.st_atime_ns,
        tuple(sorted(found.links, key=lambda link: os.fsencode(link.name))),
        found.twins(),
        sum(seen.st_blocks for _, seen in found.files) * 512,
        sum(seen.st_nlink > 1 for _, seen in found.files),
    )


class _Found:
    """What a directory holds, entry by entry."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self.digest = b""
        self.files: List[Tuple[bytes, os.stat_result]] = []
        self.directories: List[Tuple[str, bool]] = []
        self.links: List[LinkEntry] = []
        self.specials: List[Tuple[str, str]] = []
        self.problems: List[Tuple[str, str]] = []

    def read(self, fd: int, digest: bool) -> None:
        """Read the directory; an error half-way through a listing is not its end, but a problem."""
        everything: List[bytes] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if digest:
                        everything.append(os.fsencode(entry.name))
                    self._classify(entry)
        except OSError as exc:
            self.problems.append(("", reason_of(exc)))
        if digest:
            self.digest = names_digest(everything)

    def _classify(self, entry: os.DirEntry[str]) -> None:
        """Sort one entry into the lists, with no stat for a directory and one for anything else."""
        try:
            link = entry.is_symlink()
            if not link and entry.is_dir(follow_symlinks=False):
                self.directories.append((entry.name, False))
                return
            st = entry.stat(follow_symlinks=link and self._look.follow)
        except OSError as exc:
            dangling = exc.errno == errno.ENOENT and entry.is_symlink()
            self.problems.append((entry.name, ("dangling symbolic link: " if dangling else "") + reason_of(exc)))
            return
        if stat.S_ISREG(st.st_mode):
            self.files.append((os.fsencode(entry.name), st))
        elif stat.S_ISDIR(st.st_mode):
            self.directories.append((entry.name, link))
        elif stat.S_ISLNK(st.st_mode):
            twin = self._look.twins and st.st_nlink > 1
            self.links.append(LinkEntry(entry.name, st.st_dev * twin, st.st_ino * twin))
        else:
            self.specials.append((entry.name, kind_of(st.st_mode)))

    def twins(self) -> Tuple[int, ...]:
        """The positions of files that have another name or, where links are followed, may be reached by one."""
        if not self._look.twins:
            return ()
        return tuple(i for i, (_, st) in enumerate(self.files) if self._look.follow or st.st_nlink > 1)


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
                found = sorted((os.fsencode(e.name), _letter(e), e.inode(), *_times(e, request.times)) for e in entries)
        finally:
            os.close(fd)
    except OSError as exc:
        return DestinationListing(identity, errno=exc.errno or errno.EIO, reason=reason_of(exc))
    return DestinationListing(
        identity,
        b"\0".join(entry[0] for entry in found),
        "".join(entry[1] for entry in found).encode(),
        array("Q", (entry[2] for entry in found)).tobytes(),
        times=array("Q", (number for entry in found for number in entry[3:])).tobytes() if request.times else b"",
    )


def _times(entry: os.DirEntry[str], wanted: bool) -> Tuple[int, int]:
    """Size and mtime, if they are wanted and it is a file."""
    if not wanted or not entry.is_file(follow_symlinks=False):
        return (0, 0)
    try:
        st = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # gone since: what is to be replaced is looked at again then
        return (0, 0)
    return st.st_size, st.st_mtime_ns & TIME_MASK


def _letter(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "l"
    if entry.is_dir(follow_symlinks=False):
        return "d"
    return "f" if entry.is_file(follow_symlinks=False) else "o"


class SerialLister:
    """``list_directories`` in this process, one directory after the other: the walk's default.

    It keeps its chain between calls: from level to level, each directory of a deep tree is one open.
    """

    def __init__(self) -> None:
        self._chain: Optional[DirectoryChain] = None
        self._root = ("", False)

    def __call__(self, requests: Sequence[Request]) -> Sequence[Union[Listing, DestinationListing]]:
        """List the directories; the results are in the order of the requests."""
        return [self._list(request) for request in requests]

    def _list(self, request: Request) -> Union[Listing, DestinationListing]:
        root = (request.root, request.destination)
        try:
            if self._chain is None or self._root != root:
                self.close()
                self._root = root
                self._chain = open_chain(open_root(*root), request.destination)
            return list_directory(self._chain, request)
        except OSError as exc:
            return unlisted(request, exc)

    def close(self) -> None:
        """Close what is open."""
        if self._chain is not None:
            self._chain.close()
            self._chain = None


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

    __slots__ = ("source", "shown", "components", "look", "root", "choice")

    def __init__(self, source: str, shown: str, components: Tuple[str, ...], look: Look = FOLLOW) -> None:
        self.source = source  # absolute, never normalised
        self.shown = shown  # as the user gave it
        self.components = components
        self.look = look
        # Of a directory's listing what is wanted, by its components; None: everything.
        self.choice: Optional[Callable[[Sequence[str], Listing], Listing]] = None
        self.root = Directory(self, None, "", False)


class Directory:
    """A directory of a walked tree: where it hangs, what identifies it, its files (compact) and children.

    ``existing`` is None where DEST has no such directory; else the names in it that the plan will replace.
    ``compare`` are those of them whose bytes decide, ``left`` the names that the plan does not copy.
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
        "owner",
        "atime_ns",
        "links",
        "twins",
        "allocated",
        "shared",
        "compare",
        "left",
    )

    def __init__(self, tree: Tree, parent: Optional[Directory], name: str, followed: bool) -> None:
        self.tree = tree
        self.parent = parent
        self.name = name
        self.followed = followed
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.identity = Identity(0, 0, 0, 0)
        self.mode = 0
        self.digest = b""
        self.names = b""
        self.stats = array("Q")
        self.children: List[Directory] = []
        self.destination: Optional[Identity] = None
        self.existing: Optional[Set[bytes]] = None
        self.owner = (0, 0)
        self.atime_ns = 0
        self.links: Tuple[LinkEntry, ...] = ()
        self.twins: Tuple[int, ...] = ()
        self.allocated = 0
        self.shared = 0
        self.compare: AbstractSet[bytes] = frozenset()
        self.left: AbstractSet[bytes] = frozenset()

    def fill(self, listing: Listing, identity: Identity) -> None:
        """Take what a listing found."""
        self.identity, self.mode, self.digest = identity, listing.mode, listing.digest
        self.names = listing.names
        self.stats = array("Q")
        self.stats.frombytes(listing.stats)
        self.owner, self.atime_ns, self.allocated = listing.owner, listing.atime_ns, listing.allocated
        self.links, self.twins, self.shared = listing.links, listing.twins, listing.shared
        self.children = [Directory(self.tree, self, name, followed) for name, followed in listing.directories]

    def lineage(self) -> List[Directory]:
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
        return Request(self.tree.source, tuple(d.name for d in line), links, look=self.tree.look)

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

    def drop(self, names: Set[bytes]) -> None:
        """Forget files and links of these names: the plan leaves them alone."""
        kept = [entry for entry in self.files() if os.fsencode(entry.name) not in names]
        self.names = b"\0".join(os.fsencode(entry.name) for entry in kept)
        self.stats = array("Q", (number for entry in kept for number in entry[1:]))
        self.links = tuple(link for link in self.links if os.fsencode(link.name) not in names)
        self.allocated = min(self.allocated, sum(self.sizes()))  # how much of it was theirs is not known
        self.shared = min(self.shared, self.count())

    def files(self) -> Iterator[FileEntry]:
        """Its files in byte order of their names."""
        for index, name in enumerate(self.file_names()):
            yield FileEntry(os.fsdecode(name), *self.stats[index * FIELDS : (index + 1) * FIELDS])


class TreeProblems:
    """What a walk could not take: unreadable entries and special files, as (path, reason or kind).

    ``mounts`` are the directories on which another filesystem is mounted.
    """

    def __init__(self) -> None:
        self.unreadable: List[Tuple[str, str]] = []
        self.specials: List[Tuple[str, str]] = []
        self.mounts: List[str] = []


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
    if listing.identity and directory.followed and _is_cycle(directory, listing.identity):
        problems.unreadable.append((directory.shown(), "cyclic symbolic link: it leads to a directory above itself"))
        return
    if directory.tree.choice is not None:
        listing = directory.tree.choice(directory.components(), listing)
    problems.unreadable.extend((directory.shown(name), reason) for name, reason in listing.problems)
    problems.specials.extend((directory.shown(name), kind) for name, kind in listing.specials)
    if listing.identity is None:
        return
    directory.fill(listing, listing.identity)
    above = directory.parent
    if above is not None and not directory.followed and above.identity.dev != directory.identity.dev:
        problems.mounts.append(directory.shown())
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
