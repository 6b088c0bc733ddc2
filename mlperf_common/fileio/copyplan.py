# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What goes where: cp's argument rules and the plan of a copy. Reads only, writes nothing.

The request is classified once (a file to a name, a tree to a name, anything into a directory), every refusal is
decided here, and what is left is data: after this module nobody asks "is it a directory?" again. The strict walk
is the neighbour ``walk``, what stands at the destination ``landing``, the refusals themselves ``refusals``.

Not promised: that the tree stays as it was seen. Whoever copies compares each file with what the plan saw.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from mlperf_common.fileio.choosing import Choice, NotBelow
from mlperf_common.fileio.landing import Base, DestinationCheck, LooseFile, Wishes
from mlperf_common.fileio.refusals import (
    INTO_ITSELF,
    NOT_REGULAR,
    OVER_DIRECTORY,
    OVER_FILE,
    SAME_FILE,
    SPECIAL,
    CopyArgumentError,
    CopyIntoItself,
    DestinationExists,
    DestinationNewer,
    DirectoryInTheWay,
    JustCreated,
    MissingOperand,
    MissingSource,
    NonDirectoryInTheWay,
    NotRegularDestination,
    OmittedDirectory,
    OverwritesSource,
    Refusals,
    SameFile,
    SpecialFiles,
    TargetNotDirectory,
    UnreadableEntries,
    UnusableDestination,
)
from mlperf_common.fileio.traces import Landing, Traces
from mlperf_common.fileio.twins import Family, Standing, Twin, find_families
from mlperf_common.fileio.walk import (
    TIME_MASK,
    Directory,
    FileEntry,
    Identity,
    ListDirectories,
    Look,
    SerialLister,
    Tree,
    TreeProblems,
    breadth_first,
    identity_of,
    walk,
)
from mlperf_common.fileio.words import kind_of, quote, reason_of

__all__ = [
    "CopyArgumentError",
    "CopyIntoItself",
    "CopyPlan",
    "DestinationExists",
    "DestinationNewer",
    "DirectoryInTheWay",
    "JustCreated",
    "MissingOperand",
    "MissingSource",
    "NonDirectoryInTheWay",
    "NotRegularDestination",
    "OmittedDirectory",
    "OverwritesSource",
    "SameFile",
    "SpecialFiles",
    "TargetNotDirectory",
    "TreeEntries",
    "UnreadableEntries",
    "UnusableDestination",
    "list_relative_entries",
    "list_relative_files",
    "plan_copy_operations",
    "validate_copy_args",
]


def _refuse(problems: TreeProblems, skip_special: bool) -> None:
    """Raise UnreadableEntries or, unless they are to be skipped, SpecialFiles."""
    if problems.unreadable:
        raise UnreadableEntries(problems.unreadable)
    if problems.specials and not skip_special:
        raise SpecialFiles([SPECIAL % kind % quote(path) for path, kind in problems.specials])


@contextlib.contextmanager
def _lister(given: Optional[ListDirectories]) -> Iterator[ListDirectories]:
    """The lister that the caller gave, or a serial one that is closed at the end."""
    serial = SerialLister()
    try:
        yield given or serial
    finally:
        serial.close()


class TreeEntries(NamedTuple):
    """The relative paths of a tree: files in byte order, directories shallowest first; the root is not among them."""

    files: List[str]
    directories: List[str]


def list_relative_entries(
    root: str,
    skip_special: bool = False,
    list_directories: Optional[ListDirectories] = None,
    skipped: Optional[List[Tuple[str, str]]] = None,
) -> TreeEntries:
    """Walk ``root`` once, links followed; its files and directories as paths relative to it.

    ``skipped`` receives the (path, kind) of special files that ``skip_special`` leaves out.
    Raises UnreadableEntries with everything that could not be looked at or listed, a missing root and cycles of
    links included; SpecialFiles.
    """
    tree = list_tree(root, skip_special, list_directories, skipped)
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


def list_tree(
    root: str,
    skip_special: bool = False,
    list_directories: Optional[ListDirectories] = None,
    skipped: Optional[List[Tuple[str, str]]] = None,
    follow: bool = True,
) -> Tree:
    """Walk ``root`` once; the tree, compact. As ``list_relative_entries``; without ``follow`` links are links."""
    tree = Tree(absolute(root), root, (), Look(follow))
    if not root:
        raise UnreadableEntries([("", os.strerror(errno.ENOENT))])
    with _lister(list_directories) as lister:
        problems = walk([tree], lister)
    _refuse(problems, skip_special)
    if skipped is not None:
        skipped.extend(problems.specials)
    return tree


def list_relative_files(
    root: str,
    skip_special: bool = False,
    list_directories: Optional[ListDirectories] = None,
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


class CopyPlan(NamedTuple):
    """What a copy will do.

    ``files``: (absolute source, absolute destination, size in bytes), in byte order of the destination.
    ``directories``: every destination directory that the copy needs, parents of files and empty ones alike,
    shallowest first. The rest is what the copier works from: the base, trees and loose files, and the
    special files left out as (path, kind); ``links``, the symbolic links copied as such, as (absolute source,
    absolute destination); ``families``, names of one file that become names of one file (``twins``);
    ``unchanged``, how many files -u leaves as they are, ``standing``, which; ``mounts``, directories on which
    another filesystem is mounted; ``top``, where DEST is below the base; ``traces``, what other runs have left there;
    ``missing``, what a list names and is not there, as (source as given, absolute destination).
    """

    files: Sequence[Tuple[str, str, int]]
    directories: Sequence[str]
    base: Base = Base("", "", Identity(0, 0, 0, 0))
    trees: Sequence[Tree] = ()
    loose: Sequence[LooseFile] = ()
    skipped: Sequence[Tuple[str, str]] = ()
    links: Sequence[Tuple[str, str]] = ()
    families: Sequence[Family] = ()
    unchanged: int = 0
    standing: Sequence[Standing] = ()
    mounts: Sequence[str] = ()
    top: Landing = ()
    traces: Traces = Traces()
    missing: Sequence[Tuple[str, str]] = ()

    def size(self) -> int:
        """The bytes of all its files, those with several names once."""
        trees = sum(sum(directory.sizes()) for directory in breadth_first(self.trees))
        twice = sum(family.size * len(family.followers) for family in self.families)
        return trees + sum(file.entry.size for file in self.loose if not file.is_link) - twice

    def allocated(self) -> int:
        """The bytes that its files occupy where they are."""
        trees = sum(directory.allocated for directory in breadth_first(self.trees))
        return trees + sum(file.allocated for file in self.loose)

    def shared(self) -> int:
        """How many of its files have other names (hard links), in the trees or elsewhere."""
        trees = sum(directory.shared for directory in breadth_first(self.trees))
        return trees + sum(file.nlink > 1 and not file.is_link for file in self.loose)


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


# The sort key, source, destination, size, and the directory whose contents go there, if it is one.
Place = Tuple[bytes, str, str, int, Optional[Directory]]


def planned_files(base: Base, trees: Sequence[Tree], loose: Sequence[LooseFile]) -> Iterator[Tuple[str, str, int]]:
    """The plan's files in byte order of their destinations, without sorting them all.

    A directory's files and children merge by name, a child's with its slash: no file's name can sort between
    two paths that begin with the same ``child/``.
    """
    top: List[Place] = [
        (os.fsencode(file.name), file.source, os.path.join(base.path, file.name), file.entry.size, None)
        for file in loose
        if not file.is_link
    ]
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
            continue
        _, source, destination, size, inside = place
        if inside is None:
            yield source, destination, size
        else:
            stack.append(iter(_places(inside, source, destination)))


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


def planned_links(base: Base, trees: Sequence[Tree], loose: Sequence[LooseFile]) -> Iterator[Tuple[str, str]]:
    """The links that are copied as links, shallowest first."""
    for file in loose:
        if file.is_link:
            yield file.source, os.path.join(base.path, file.name)
    for directory in breadth_first(trees):
        if directory.links:
            source, landing = directory.path(), os.path.join(base.path, *directory.landing())
            for link in directory.links:
                yield os.path.join(source, link.name), os.path.join(landing, link.name)


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
        """Whether it is a directory, links followed if operands that are links are."""
        return stat.S_ISDIR(self.st.st_mode)

    def is_link(self) -> bool:
        """Whether it is a link that is to be copied as one."""
        return stat.S_ISLNK(self.st.st_mode)

    def landing(self, base: Base) -> str:
        """Where it lands, for messages, as cp would show it."""
        return os.path.join(base.shown, self.name or ".")


def _examine(sources: Sequence[str], recursive: bool, follow: bool) -> List[Operand]:
    """Look at every source operand; refuse what is missing, then directories without -r."""
    refusals = Refusals()
    operands = []
    for source in sources:
        try:
            st = os.stat(source) if follow else os.lstat(source)
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
    sources: Sequence[str],
    destination: str,
    recursive: bool,
    into_directory: bool,
    no_target_directory: bool,
    follow: bool = True,
) -> Tuple[Base, List[Operand]]:
    """Classify the request and look at its operands: what goes under which name of which directory."""
    if not sources:
        raise MissingOperand(["missing file operand"])
    if no_target_directory and len(sources) > 1:
        raise MissingOperand(["extra operand %s" % quote(sources[2] if len(sources) > 2 else destination)])
    if into_directory or len(sources) > 1:
        base = _target(destination, into_directory)
        operands = [o._replace(name=entry_name(o.shown)) for o in _examine(sources, recursive, follow)]
        return base, operands
    base, operand = _single(_examine(sources, recursive, follow)[0], destination, no_target_directory)
    return base, [operand]


def ancestors(path: str) -> Set[Tuple[int, int]]:
    """Device and inode of the directory ``path`` and of all above it, up to the root, whose parent is itself."""
    found: Set[Tuple[int, int]] = set()
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            identity = identity_of(os.fstat(fd))[:2]
            if identity in found:
                return found
            found.add(identity)
            try:
                above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
            except PermissionError:  # no walk can come down from above here either
                return found
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
    except OSError as exc:
        shown = quote(os.path.join(base.shown, name))
        raise UnusableDestination(["cannot stat %s: %s" % (shown, reason_of(exc))]) from exc


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
    checked = [operand._replace(standing=_standing(base, operand.name or ".")) for operand in operands]
    above = ancestors(base.path)
    taken: Set[str] = set()
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
    if standing is None or (operand.is_link() and stat.S_ISLNK(standing.st_mode)):
        return _check_same_link(base, operand, refusals)
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


def _check_same_link(base: Base, operand: Operand, refusals: Refusals) -> None:
    """A link on a link: one may take the other's place, unless they are the same."""
    standing = operand.standing
    if standing is not None and (standing.st_dev, standing.st_ino) == (operand.st.st_dev, operand.st.st_ino):
        refusals.add(SameFile, SAME_FILE, operand.shown, operand.landing(base))


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


FOLLOW_ALL, FOLLOW_OPERANDS, FOLLOW_NONE = "all", "operands", "none"  # -L, -H, -P


def plan_copy_operations(
    sources: Sequence[str],
    destination: str,
    recursive: bool = True,
    into_directory: bool = False,
    no_target_directory: bool = False,
    force: bool = False,
    skip_special: bool = False,
    list_directories: Optional[ListDirectories] = None,
    follow: str = FOLLOW_ALL,
    one_file_system: bool = False,
    update: bool = False,
    checksum: bool = False,
    keep_links: bool = False,
    ignore_times: bool = False,
    choice: Optional[Choice] = None,
) -> CopyPlan:
    """Plan the copy that ``cp -rL SOURCES DESTINATION`` would make, or refuse it whole. Reads only.

    ``force``: existing files are replaced; without it each is a refusal. ``skip_special``: FIFOs, sockets and
    devices are left out and listed in ``skipped``. ``follow``: which links are taken for what they lead to, as cp's
    -L, -H and -P. ``one_file_system``: as cp's -x. ``update``: of the existing files those that are older are
    replaced; with ``checksum`` those that differ. ``keep_links``: names of one file stay so. ``ignore_times``:
    modification times are not trusted.
    ``choice``: what is wanted of the trees. Raises CopyArgumentError's subclasses; UnreadableEntries.
    """
    followed = follow != FOLLOW_NONE
    base, operands = _resolve(sources, destination, recursive, into_directory, no_target_directory, followed)
    look = Look(follow == FOLLOW_ALL, None, ignore_times, keep_links)
    if choice is not None and choice.lists and not all(operand.is_tree() for operand in operands):
        raise NotBelow(["a list of names needs a directory, not %s" % quote(operands[0].shown)])
    rules = _Rules(look, one_file_system, skip_special, Wishes(force, update, checksum), choice)
    with _lister(list_directories) as lister:
        plan = _plan(base, operands, rules, lister)
    return plan._replace(top=_top(plan, destination))


class _Rules(NamedTuple):
    look: Look
    one_file_system: bool
    skip_special: bool
    wishes: Wishes
    choice: Optional[Choice] = None


def _plan(base: Base, operands: Sequence[Operand], rules: _Rules, lister: ListDirectories) -> CopyPlan:
    refusals = Refusals()
    checked, skipped = _without_specials(_check_landings(base, operands, refusals), rules.skip_special, refusals)
    _check_writable(base, checked, refusals)
    refusals.raise_first()

    trees = [_tree(operand, rules.look, rules.one_file_system) for operand in checked if operand.is_tree()]
    loose = [_loose(operand) for operand in checked if not operand.is_tree()]
    if rules.choice is not None:
        for tree in trees:
            tree.choice = rules.choice.of
    problems = walk(trees, lister)
    _check_nesting(base, checked, trees, refusals)
    refusals.raise_first()
    _refuse(problems, rules.skip_special)
    check = DestinationCheck(base, trees, loose, refusals, rules.wishes)
    check.run(lister)
    for rule in (DestinationExists, DestinationNewer) if rules.wishes.force else ():
        refusals.drop(rule)
    refusals.raise_first()
    families = find_families(trees, loose, check.unchanged) if rules.look.twins else []
    standing = _standing_names(loose, check.unchanged)
    return _make_plan(base, trees, _without_unchanged(loose, check.unchanged), families)._replace(
        standing=standing,
        skipped=skipped + problems.specials,
        unchanged=check.count(),
        mounts=problems.mounts,
        traces=check.traces,
        missing=_missing(base, trees, rules.choice),
    )


def _missing(base: Base, trees: Sequence[Tree], choice: Optional[Choice]) -> List[Tuple[str, str]]:
    if choice is None or not trees:
        return []
    tree = trees[0]  # a list is of one tree
    return [
        (os.path.join(tree.shown, name), os.path.join(base.path, *tree.components, name)) for name in choice.missing
    ]


def _check_writable(base: Base, operands: Sequence[Operand], refusals: Refusals) -> None:
    """New names in a directory in which none can be made: better known before a large tree is walked than after."""
    new = [operand for operand in operands if operand.standing is None and operand.name]
    if not new or os.access(base.path, os.W_OK | os.X_OK, effective_ids=True):
        return
    number = errno.EROFS if os.statvfs(base.path).f_flag & os.ST_RDONLY else errno.EACCES
    for operand in new:
        what = "directory" if operand.is_tree() else "symbolic link" if operand.is_link() else "regular file"
        text = "cannot create %s %%s: %s" % (what, os.strerror(number))
        refusals.add(UnusableDestination, text, operand.landing(base))


def _top(plan: CopyPlan, destination: str) -> Landing:
    """Where DEST is below the base: a directory that is to be made, or the base itself."""
    new = len(plan.trees) == 1 and not plan.loose and not os.path.isdir(destination)
    return plan.trees[0].components if new else ()


def _standing_names(
    loose: Sequence[LooseFile], unchanged: Mapping[Optional[Directory], Set[bytes]]
) -> List[Standing]:
    """What -u leaves alone, name by name."""
    found: List[Standing] = []
    for directory, names in unchanged.items():
        if directory is None:
            continue
        links = {os.fsencode(link.name) for link in directory.links}
        found.extend(Standing(Twin(directory, os.fsdecode(name)), "", "", name in links) for name in sorted(names))
    names = unchanged.get(None, set())
    kept = [file for file in loose if os.fsencode(file.name) in names]
    return found + [Standing(Twin(None, file.name), file.source, file.shown, file.is_link) for file in kept]


def _without_unchanged(
    loose: Sequence[LooseFile], unchanged: Dict[Optional[Directory], Set[bytes]]
) -> List[LooseFile]:
    """Take what -u leaves alone out of the trees, and out of the operands."""
    for directory, names in unchanged.items():
        if directory is not None:
            directory.drop(names)
    names = unchanged.get(None, set())
    return [file for file in loose if os.fsencode(file.name) not in names]


def _make_plan(
    base: Base, trees: Sequence[Tree], loose: Sequence[LooseFile], families: Sequence[Family]
) -> CopyPlan:
    everything = breadth_first(trees)
    files = sum(not file.is_link for file in loose) + sum(d.count() for d in everything)
    links = sum(file.is_link for file in loose) + sum(len(d.links) for d in everything)
    return CopyPlan(
        OnDemand(lambda: planned_files(base, trees, loose), files),
        planned_directories(base, trees, loose),
        base,
        trees,
        loose,
        links=OnDemand(lambda: planned_links(base, trees, loose), links),
        families=families,
    )


def _without_specials(
    operands: Sequence[Operand], skip_special: bool, refusals: Refusals
) -> Tuple[List[Operand], List[Tuple[str, str]]]:
    """The operands that are files or directories, and the others as (path, kind)."""
    kept, skipped = [], []
    for operand in operands:
        if operand.is_tree() or operand.is_link() or stat.S_ISREG(operand.st.st_mode):
            kept.append(operand)
            continue
        skipped.append((operand.shown, kind_of(operand.st.st_mode)))
        if not skip_special:
            refusals.add(SpecialFiles, SPECIAL % skipped[-1][1], operand.shown)
    return kept, skipped


def _tree(operand: Operand, look: Look, one_file_system: bool) -> Tree:
    if one_file_system:
        look = look._replace(device=operand.st.st_dev)
    tree = Tree(absolute(operand.shown), operand.shown, (operand.name,) if operand.name else (), look)
    if operand.standing is not None:
        tree.root.existing = set()
    return tree


def _loose(operand: Operand) -> LooseFile:
    st = operand.st
    entry = FileEntry(operand.name, st.st_size, st.st_dev, st.st_ino, st.st_mtime_ns & TIME_MASK)
    return LooseFile(
        absolute(operand.shown),
        operand.shown,
        operand.name,
        entry,
        operand.standing,
        operand.is_link(),
        nlink=st.st_nlink,
        allocated=st.st_blocks * 512,
    )


def _check_nesting(base: Base, operands: Sequence[Operand], trees: Sequence[Tree], refusals: Refusals) -> None:
    """What only the walk can tell: a followed link to DEST or above it, contents that meet another operand."""
    above = ancestors(base.path)
    taken = {operand.name for operand in operands if operand.name}
    for tree in trees:
        if tree.components:
            continue
        names = [child.name for child in tree.root.children] + [f.name for f in tree.root.files()]
        for name in names + [link.name for link in tree.root.links]:
            if name in taken:
                path = os.path.join(base.shown, name)
                refusals.add(JustCreated, "will not overwrite just-created %s with %s", path, tree.root.shown(name))
    inside: Set[Directory] = set()
    for directory in breadth_first(trees):
        if directory.parent in inside:
            inside.add(directory)  # one message for what is below it too
        elif directory.parent is not None and directory.identity[:2] in above:
            inside.add(directory)
            landing = os.path.join(base.shown, *directory.landing())
            refusals.add(CopyIntoItself, INTO_ITSELF, directory.shown(), landing)
