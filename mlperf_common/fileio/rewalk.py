# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A walk of the source that is recorded once and read again on other nodes, so that these never walk it.

What is recorded are the listings of source directories, in the order in which they were asked for. Read again, the
same questions get the same answers, and whatever is asked of a destination goes to a lister of this node. Device
numbers do not travel: the operands' are those of this node, others are marked as foreign, which stands for any, but
two files of one inode on two of them are not taken for one.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from array import array
from typing import IO, Any, Dict, List, Sequence

from mlperf_common.fileio.listing import AnyListing
from mlperf_common.fileio.walk import FIELDS, FOREIGN, Identity, LinkEntry, ListDirectories, Listing, Request

DEVICE = 1  # the position of a file's device among its numbers


class Recording:
    """A lister that writes down what it finds in source directories; ``stream`` is a text file."""

    def __init__(self, lister: Any, stream: IO[str]) -> None:
        self._lister = lister
        self._stream = stream

    def __call__(self, requests: Sequence[Request]) -> Sequence[AnyListing]:
        """List the directories; the results are in the order of the requests."""
        results: Sequence[AnyListing] = self._lister(requests)
        for request, listing in zip(requests, results):
            if isinstance(listing, Listing):
                json.dump([request.root, request.components, encode(listing)], self._stream)
                self._stream.write("\n")
        return results

    def found(self) -> int:
        """How many entries have been found so far."""
        return int(self._lister.found())


class Replay:
    """A lister that reads what was written down. Raises OSError (EIO) if it is asked for anything else."""

    def __init__(self, lister: ListDirectories, stream: IO[str]) -> None:
        self._lister = lister
        self._stream = stream
        self._devices: Dict[int, int] = {}

    def __call__(self, requests: Sequence[Request]) -> Sequence[AnyListing]:
        """The results in the order of the requests, all of which are for sources, or all for destinations."""
        if not requests or requests[0].destination:
            return self._lister(requests)
        return [self._read(request) for request in requests]

    def _read(self, request: Request) -> Listing:
        line = self._stream.readline()
        root, components, value = json.loads(line) if line.endswith("\n") else ("", (), None)
        if value is None or (root, tuple(components)) != (request.root, request.components):
            raise OSError(errno.EIO, "the recorded walk is not that of this request", request.root)
        listing = decode(value)
        if listing.identity is not None and not request.components:
            self._devices[listing.identity.dev] = os.stat(request.root).st_dev
        return _with_devices(listing, self._devices)


def encode(listing: Listing) -> List[Any]:
    """A listing as JSON knows it."""
    fields = listing._asdict()
    for name in ("digest", "names", "stats"):
        fields[name] = base64.b64encode(fields[name]).decode("ascii")
    return list(fields.values())


def decode(value: Sequence[Any]) -> Listing:
    """The listing again."""
    fields = dict(zip(Listing._fields, value))
    for name in ("digest", "names", "stats"):
        fields[name] = base64.b64decode(fields[name])
    for name in ("directories", "specials", "problems"):
        fields[name] = tuple(tuple(entry) for entry in fields[name])
    fields["links"] = tuple(LinkEntry(*entry) for entry in fields["links"])
    fields["owner"], fields["twins"] = tuple(fields["owner"]), tuple(fields["twins"])
    if fields["identity"] is not None:
        fields["identity"] = Identity(*fields["identity"])
    return Listing(**fields)


def _with_devices(listing: Listing, devices: Dict[int, int]) -> Listing:
    def here(device: int) -> int:
        return devices.get(device, device | FOREIGN)

    numbers = array("Q")
    numbers.frombytes(listing.stats)
    numbers[DEVICE::FIELDS] = array("Q", map(here, numbers[DEVICE::FIELDS]))
    links = tuple(link._replace(dev=here(link.dev)) if link.ino else link for link in listing.links)
    identity = listing.identity
    if identity is not None:
        identity = identity._replace(dev=here(identity.dev))
    return listing._replace(identity=identity, stats=numbers.tobytes(), links=links)
