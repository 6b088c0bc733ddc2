# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What the files and links of a plan are as work: large files, links, queues of small files. Placement only."""

from __future__ import annotations

import os
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import batches, walk
from mlperf_common.fileio.batches import PlannedFile, Queue
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.landing import LooseFile
from mlperf_common.fileio.largefile import LargeFile
from mlperf_common.fileio.walk import Directory

LINKS = 32  # in one task: with names of 255 bytes that is 16 KiB


class Links(NamedTuple):
    """Links of one directory (None: operands) for one task: where to read each, its name, whether it replaces."""

    directory: Optional[Directory]
    names: Tuple[Tuple[str, str, bool], ...]


class Work(NamedTuple):
    """Large files, largest first; links; and queues of small files, one of each directory."""

    larges: List[LargeFile]
    links: List[Links]
    queues: List[Queue]


def sort_out(plan: CopyPlan, is_broken: Callable[[Directory], bool]) -> Work:
    """The work of a whole plan; nothing below a directory that is not there."""
    work = Work([], [], [])
    if plan.loose:
        split(None, list(batches.files_of_operands(plan.loose)), work)
        left = {file.name for file in plan.loose if file.left}
        work.links.extend(cut_links(None, [link for link in links_of_operands(plan.loose) if link[1] not in left]))
    for directory in walk.breadth_first(plan.trees):
        if is_broken(directory):
            continue
        links = [link for link in links_of(directory) if os.fsencode(link[1]) not in directory.left]
        work.links.extend(cut_links(directory, links))
        if not directory.count():
            continue
        if max(directory.sizes()) <= batches.EXTENT:  # the rule; its files are made when they are due
            work.queues.append(Queue(directory, batches.files_of(directory), directory.count()))
        else:
            split(directory, list(batches.files_of(directory)), work)
    work.larges.sort(key=lambda large: -large.file.entry.size)
    return work


def split(directory: Optional[Directory], files: Sequence[PlannedFile], work: Work) -> None:
    """Add the files of one directory (None: operands)."""
    small = [file for file in files if not batches.is_large(file)]
    work.larges.extend(LargeFile(directory, file) for file in files if batches.is_large(file))
    if small:
        work.queues.append(Queue(directory, iter(small), len(small)))


def links_of(directory: Directory) -> List[Tuple[str, str, bool]]:
    """The links of a directory, as in ``Links``."""
    existing = directory.existing or batches.NOTHING
    return [(link.name, link.name, os.fsencode(link.name) in existing) for link in directory.links]


def links_of_operands(loose: Sequence[LooseFile]) -> List[Tuple[str, str, bool]]:
    """Those among the operands."""
    return [(file.source, file.name, file.standing is not None) for file in loose if file.is_link]


def cut_links(directory: Optional[Directory], links: Sequence[Tuple[str, str, bool]]) -> Iterator[Links]:
    """In pieces whose message is small even where all names are long."""
    for start in range(0, len(links), LINKS):
        yield Links(directory, tuple(links[start : start + LINKS]))
