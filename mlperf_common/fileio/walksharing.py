# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One walk by several ranks: rank 0 leads it level by level, all ranks list the directories of its wide levels.

Each directory is listed once, by whichever rank claims it, so the load on the filesystem is that of one walk. Device
numbers do not travel: a rank's listing counts only if it went well and everything in it is on the operand's own device,
which is then taken for rank 0's. Whatever does not count is listed by rank 0 itself.

Promises: rank 0's walk sees what it would have seen alone, as far as all ranks see one filesystem. An operand that is
not the same directory to another rank (inode and both times) is not listed there.
"""

from __future__ import annotations

import os
import time
from array import array
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from mlperf_common.fileio import claims
from mlperf_common.fileio.claims import Claims, Publisher
from mlperf_common.fileio.listing import AnyListing, AnyPool, PoolLister, Roots
from mlperf_common.fileio.rewalk import DEVICE, decode, encode
from mlperf_common.fileio.sharing import Crew
from mlperf_common.fileio.walk import FIELDS, Listing, Look, Request, identity_of

PLACE = "walk"
LISTED = "listed"

# Pieces of a level for each rank: as in dealing, so that a slow rank ends its first while the others do the rest.
PARTS = 4

SHORTEST = 0.002  # seconds between two looks: a wait begins with it and doubles it ...
LONGEST, LOOKS_PER_SECOND = 0.25, 4000  # ... up to so many, or less if all ranks together still look no more often


@contextmanager
def shared_walk(crew: Crew, pool: AnyPool, roots: Roots) -> Iterator[Optional[RankLister]]:
    """In rank 0 a lister for the body of the with block; the other ranks list here what it asks for, then get None.

    Raises what ``pool.run`` and ``crew.check`` do, OSError.
    """
    if crew.rank == 0:
        os.mkdir(PLACE, 0o700, dir_fd=crew.place)
        with _opened(crew) as place:
            lister = RankLister(crew, place, pool, roots)
            crew.barrier()
            try:
                yield lister
            finally:
                lister.finish()
    else:
        crew.barrier()
        with _opened(crew) as place:
            _help(crew, place, Claims(place, crew.rank, crew.ranks), pool, roots)
            yield None


@contextmanager
def _opened(crew: Crew) -> Iterator[int]:
    fd = os.open(PLACE, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=crew.place)
    try:
        yield fd
    finally:
        os.close(fd)


def _help(crew: Crew, place: int, own: Claims, pool: AnyPool, roots: Roots) -> None:
    """List what is published until the walk is over."""
    pauses = _pauses(crew)
    while not own.is_over():
        found = own.next()
        if found is None:
            next(pauses)
            continue
        number, item = found
        listings = [None if listing is None else encode(listing) for listing in _list(item, pool, roots)]
        claims.write_json(place, "%s/%d" % (LISTED, number), listings)
        pauses = _pauses(crew)


def _pauses(crew: Crew) -> Iterator[None]:
    """Goes on for ever, each step a longer pause; raises if a rank has failed."""
    pause = SHORTEST
    while True:
        crew.check()
        time.sleep(pause)
        pause = min(2 * pause, max(0.02, min(LONGEST, crew.ranks / LOOKS_PER_SECOND)))
        yield


class RankLister:
    """``list_directories`` of rank 0: what is wide enough is shared, all else is listed by its own pool."""

    def __init__(self, crew: Crew, place: int, pool: AnyPool, roots: Roots) -> None:
        """``place`` is a new, empty directory, open."""
        self._crew = crew
        self._place = place
        self._pool = pool
        self._roots = roots
        self._alone = PoolLister(pool, roots)
        os.mkdir(LISTED, 0o700, dir_fd=place)
        self._publisher = Publisher(place)
        self._claims = Claims(place, crew.rank, crew.ranks)
        self._found = 0

    def found(self) -> int:
        """How many files and directories have been found so far, whichever rank has listed them."""
        return self._found + self._alone.found()

    def _note(self, listings: Sequence[Optional[Listing]]) -> Sequence[Optional[Listing]]:
        self._found += sum(listing.entries() for listing in listings if listing is not None)
        return listings

    def finish(self) -> None:
        """The walk is over, and the other ranks stop listing. Raises OSError."""
        self._publisher.finish()

    def __call__(self, requests: Sequence[Request]) -> Sequence[AnyListing]:
        """List the directories; the results are in the order of the requests."""
        # Fewer than this its own workers begin at once; to share them takes two looks of the other ranks. A piece keeps
        # all workers of a rank busy, as far as all ranks have as many.
        if len(requests) <= 2 * self._pool.width or requests[0].destination:
            return self._alone(requests)
        length = self._pool.width * max(1, len(requests) // (PARTS * self._crew.ranks * self._pool.width))
        pieces = [requests[start : start + length] for start in range(0, len(requests), length)]
        first = self._publisher.publish_all([self._item(piece) for piece in pieces])
        found = self._work(first, first + len(pieces))
        listings = [listing for number in range(first, first + len(pieces)) for listing in found[number]]
        return self._complete(requests, listings)

    def _item(self, requests: Sequence[Request]) -> Any:
        return [(r.root, r.components, r.links, _look_travels(r.look), self._identity(r.root)) for r in requests]

    def _identity(self, root: str) -> Any:
        """What tells the operand from another, as far as it travels; None: it cannot be opened here."""
        try:
            return identity_of(os.fstat(self._roots.get(root, False).fd))[1:]
        except OSError:  # its own lister will say so
            return None

    def _work(self, first: int, end: int) -> Dict[int, Sequence[Optional[Listing]]]:
        """List pieces of the level as long as there are any, then wait for those of the other ranks."""
        found: Dict[int, Sequence[Optional[Listing]]] = {}
        piece = self._claims.next()
        while piece is not None:
            found[piece[0]] = self._note(_list(piece[1], self._pool, self._roots))
            piece = self._claims.next()
        pauses = _pauses(self._crew)
        while len(found) < end - first:
            news = [number for number in self._told() if first <= number < end and number not in found]
            found.update((number, self._note(self._read(number))) for number in news)
            if not news:
                next(pauses)
        return found

    def _told(self) -> List[int]:
        """What other ranks have listed. The directory is opened anew: NFS remembers for long what was absent."""
        fd = os.open(LISTED, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._place)
        try:
            return [int(name) for name in os.listdir(fd) if name.isdigit()]
        finally:
            os.close(fd)

    def _read(self, number: int) -> Sequence[Optional[Listing]]:
        values = claims.read_json(self._place, "%s/%d" % (LISTED, number))
        return [None if value is None else decode(value) for value in values]

    def _complete(self, requests: Sequence[Request], listings: Sequence[Optional[Listing]]) -> List[AnyListing]:
        """The listings with this rank's devices; those that do not count are made by its own lister."""
        missing = [request for request, listing in zip(requests, listings) if listing is None]
        rest = iter(self._alone(missing) if missing else ())
        return [
            next(rest) if listing is None else _on_device(listing, self._device(request.root))
            for request, listing in zip(requests, listings)
        ]

    def _device(self, root: str) -> int:
        return os.fstat(self._roots.get(root, False).fd).st_dev


def _look_travels(look: Look) -> Any:
    return look._replace(device=None if look.device is None else 1)


def _list(item: Any, pool: AnyPool, roots: Roots) -> List[Optional[Listing]]:
    """A rank's listings of an item's directories, None where they do not count."""
    requests: List[Optional[Request]] = []
    devices: List[int] = []
    for root, components, links, look, identity in item:
        device = _device_of(root, identity, roots)
        devices.append(device)
        look = Look(*look)._replace(device=device if look[1] is not None else None)
        requests.append(Request(root, tuple(components), tuple(links), look=look) if device else None)
    found = iter(PoolLister(pool, roots)([request for request in requests if request is not None]))
    return [
        None if request is None else _counting(next(found), device) for request, device in zip(requests, devices)
    ]


def _device_of(root: str, identity: Optional[Sequence[int]], roots: Roots) -> int:
    """The operand's device on this node; 0 if it is not the directory that rank 0 has open."""
    try:
        st = os.fstat(roots.get(root, False).fd)
    except OSError:  # rank 0 lists it, or says why it cannot
        return 0
    return st.st_dev if identity is not None and tuple(identity) == identity_of(st)[1:] else 0


def _counting(listing: AnyListing, device: int) -> Optional[Listing]:
    """A listing in which nothing went wrong and all is on the operand's device; else nothing."""
    if not isinstance(listing, Listing) or listing.identity is None or listing.problems:
        return None
    numbers = array("Q")
    numbers.frombytes(listing.stats)
    devices = {listing.identity.dev, *numbers[DEVICE::FIELDS], *(link.dev for link in listing.links if link.ino)}
    return listing if devices == {device} else None


def _on_device(listing: Listing, device: int) -> Listing:
    numbers = array("Q")
    numbers.frombytes(listing.stats)
    numbers[DEVICE::FIELDS] = array("Q", [device]) * (len(numbers) // FIELDS)
    links: Tuple[Any, ...] = tuple(link._replace(dev=device) if link.ino else link for link in listing.links)
    identity = listing.identity._replace(dev=device) if listing.identity is not None else None
    return listing._replace(identity=identity, stats=numbers.tobytes(), links=links)
