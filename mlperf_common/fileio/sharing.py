# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One copy by several ranks: the leader plans and publishes the work, all claim and do it, the leader finishes.

The ranks that make one copy share a directory (``Crew.place``). In it the leader puts what is common and then the
items; each rank does what it claims with a pool of its own, and says at the end what became of it. Directories exist
before the first item does, further names of hard-linked files come when all are done, and so do the names of files
that several ranks have written together: all that is the leader's.

Promises: a rank that is not the leader walks nothing here; whatever any rank could not do is in the leader's summary.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Dict, List, NamedTuple, Set, Tuple

from mlperf_common.fileio import claims
from mlperf_common.fileio.claims import Claims, Publisher
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.dealing import deal
from mlperf_common.fileio.facts import Options
from mlperf_common.fileio.filework import FileWork, Place
from mlperf_common.fileio.largefile import LargeFile
from mlperf_common.fileio.listing import AnyPool, Roots
from mlperf_common.fileio.recording import Recorder
from mlperf_common.fileio.report import Events, Summary
from mlperf_common.fileio.sharedfile import Done, Shared
from mlperf_common.fileio.workcode import Decoder, Encoder, decode_common, encode_common, units
from mlperf_common.fileio.workload import Work

IDLE_SECONDS = 0.05  # between looks for an item, when there is none now

COMMON = "common"


class Crew(NamedTuple):
    """The ranks that make one copy, as one of them sees it: its number, how many they are, their directory.

    ``barrier`` returns when all ranks have come there; ``check`` is called often. Both raise if a rank has failed.
    ``checks_sources``: its leader looks at the end whether the source has changed; else that of another node does.
    """

    rank: int
    ranks: int
    place: int
    barrier: Callable[[], None]
    check: Callable[[], None]
    checks_sources: bool = True


class Said(Events):
    """What a rank has to say, kept for the leader; what is verbose it says itself."""

    def __init__(self, events: Events) -> None:
        self.verbose = events.verbose
        self.copied = events.copied  # type: ignore[method-assign]
        self.linked = events.linked  # type: ignore[method-assign]
        self.trace = events.trace  # type: ignore[method-assign]
        self.failures: List[Tuple[str, str, str]] = []
        self.problems: List[str] = []
        self.warnings: List[str] = []

    def failed(self, source: str, destination: str, reason: str) -> None:
        self.failures.append((source, destination, reason))

    def problem(self, line: str) -> None:
        self.problems.append(line)

    def warning(self, line: str) -> None:
        self.warnings.append(line)


class Hand:
    """One rank at work on the items of its crew."""

    def __init__(self, crew: Crew, plan: CopyPlan, files: FileWork, summary: Summary) -> None:
        self.done: List[Done] = []
        self._crew = crew
        self._files = files
        self._summary = summary
        self._claims = Claims(crew.place, crew.rank, crew.ranks)
        self._decoder = Decoder(plan, Shared(crew.place, self.done, crew.check))

    def work(self, pool: AnyPool) -> None:
        """Claim and do items until there are no more. Raises what ``pool.run`` does, OSError."""
        self._files.refill = self._refill
        try:
            while True:
                pool.run(self._files.next_task, self._files.on_result)
                if self._summary.stopped:
                    self._claims.stop()
                if self._summary.stopped or self._claims.is_over():
                    return
                self._crew.check()
                time.sleep(IDLE_SECONDS)
        finally:
            self._files.refill = lambda: False

    def abandon(self) -> None:
        """The job has failed: nothing is left of the shared files that this rank had a part of."""
        for large, number in self._decoder.cut:
            self._files.drop_shared(large, number, "", 0)

    def _refill(self) -> bool:
        item = self._claims.next()
        if item is None:
            return False
        self._files.add(self._decoder.work(item[1]))
        return True


# ------------------------------------------------------------------------------------------- ranks but the leader


def help_out(crew: Crew, pool: AnyPool, roots: Roots, events: Events, summary: Summary) -> None:
    """Do what the leader publishes, and tell it what became of that; ``summary`` gets this rank's own part of it."""
    crew.barrier()  # what is common is there, and so are the directories
    plan, options = decode_common(claims.read_json(crew.place, COMMON))
    pool.on_tick = crew.check
    said = Said(events)
    files = FileWork(plan, roots, options, summary, said, Recorder(False))
    hand = Hand(crew, plan, files, summary)
    try:
        hand.work(pool)
        files.close()
        claims.write_json(crew.place, _result_name(crew.rank), _encode_result(summary, said, hand.done, files.missing))
        crew.barrier()
    except BaseException:
        pool.abort()
        files.close()
        hand.abandon()
        raise


def _result_name(rank: int) -> str:
    return "result-%d" % rank


def _encode_result(summary: Summary, said: Said, done: List[Done], missing: Set[Place]) -> Any:
    fields = dict(vars(summary), direct=sorted(summary.direct))
    fields["refused"] = [(side, reason) for (side, _), reason in summary.refused.items()]
    return {
        "summary": fields,
        "failures": said.failures,
        "problems": said.problems,
        "warnings": said.warnings,
        "done": done,
        "missing": sorted(missing),
    }


# ------------------------------------------------------------------------------------------------------ the leader


class Lead:
    """The leader's part: what stands between the making of directories and their finishing."""

    def __init__(self, crew: Crew, plan: CopyPlan, options: Options, summary: Summary, events: Events) -> None:
        self._crew = crew
        self._plan = plan
        self._options = options
        self._summary = summary
        self._events = events
        self._encoder = Encoder(plan)
        self._warned: Set[str] = set()

    def carry_out(self, work: Work, files: FileWork, pool: AnyPool) -> None:
        """Publish the work, take part in it, take what the others say, name the files that were shared."""
        publisher = Publisher(self._crew.place)
        claims.write_json(self._crew.place, COMMON, encode_common(self._plan, self._options))
        self._crew.barrier()
        everything = [] if self._summary.stopped else units(work, self._options)
        items = deal(everything, sum(unit.cost for unit in everything), self._crew.ranks)
        # Told by as many as there are ranks: to tell one takes as long as to make it.
        for some in iter(lambda: list(itertools.islice(items, self._crew.ranks)), []):
            publisher.publish_all([self._encoder.item(parts) for parts in some])
            self._crew.check()
        publisher.finish()
        hand = Hand(self._crew, self._plan, files, self._summary)
        hand.work(pool)
        self._crew.barrier()
        done = list(hand.done)
        for rank in range(1, self._crew.ranks):
            result = claims.read_json(self._crew.place, _result_name(rank))
            done += [Done(*entry) for entry in result["done"]]
            self._take(result, files)
        self._name_shared(done, files)

    def _take(self, result: Any, files: FileWork) -> None:
        """Add what another rank has done, and say what it has to say."""
        summary, fields = self._summary, result["summary"]
        for name in ("files", "links", "outside", "same", "bytes", "failed", "problems"):
            setattr(summary, name, getattr(summary, name) + fields[name])
        summary.cloned = summary.cloned or fields["cloned"]
        summary.by_server = summary.by_server or fields["by_server"]
        summary.from_cache = summary.from_cache or fields["from_cache"]
        summary.direct.update(fields["direct"])
        summary.refused.update({(side, 0): reason for side, reason in fields["refused"]})
        if fields["stopped"]:
            summary.stop(fields["stopped"])
        for source, destination, reason in result["failures"]:
            self._events.failed(source, destination, reason)
        for line in result["problems"]:
            self._events.problem(line)
        for line in set(result["warnings"]) - self._warned:
            self._warned.add(line)
            self._events.warning(line)
        files.missing.update((tuple(landing), name) for landing, name in result["missing"])

    def _name_shared(self, done: List[Done], files: FileWork) -> None:
        """Name the files of which every byte is there; the others fail, for the first reason that was given."""
        by_file: Dict[int, List[Done]] = {}
        for entry in done:
            by_file.setdefault(entry.number, []).append(entry)
        for number, large in enumerate(self._encoder.cut):
            parts = by_file.get(number, [])
            failed = [part for part in parts if part.reason]
            if failed:
                files.drop_shared(large, number, failed[0].reason, failed[0].errno)
            elif _is_whole(parts, large):
                files.name_shared(large, number)
            else:
                files.drop_shared(large, number, "", 0)  # not all of it was tried

    def abandon(self, files: FileWork) -> None:
        """The job has failed: nothing is left of the files that were shared."""
        for number, large in enumerate(self._encoder.cut):
            files.drop_shared(large, number, "", 0)


def _is_whole(parts: List[Done], large: LargeFile) -> bool:
    at = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start != at:
            return False
        at = part.end
    return at == large.file.entry.size
