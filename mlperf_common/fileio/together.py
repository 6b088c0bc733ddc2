# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A command line that is one of several ranks: who they are, where they meet, what they copy together.

``job``: all ranks share one DEST on a filesystem that every one of them sees, which a real file proves before
anything is written. ``node``: DEST is each node's own; the ranks of a node make one whole copy together. The source is
walked once, whatever the number of ranks: rank 0 leads, all list. Nothing here is done without --distributed, and only
then is the launcher's environment read.

Promises: a refusal on any node stops all of them before the first byte; every rank ends with the same status; a rank
that fails or dies ends the others. Does not: wait for a rank longer than ``--rank-timeout`` lets it be silent.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import command, copyplan
from mlperf_common.fileio.joining import JOB, NODE
from mlperf_common.fileio.refusals import CopyArgumentError, UnreadableEntries
from mlperf_common.fileio.words import quote, reason_of

if TYPE_CHECKING:
    from mlperf_common.fileio.copyplan import CopyPlan
    from mlperf_common.fileio.facts import Options
    from mlperf_common.fileio.listing import AnyPool, Roots
    from mlperf_common.fileio.report import Events, Summary
    from mlperf_common.fileio.sharing import Crew
    from mlperf_common.fileio.walk import ListDirectories

WORDS = {JOB: "all ranks share one %s", NODE: "each node has a %s of its own"}


def run(program: str, args: Any, what: str, sources: Sequence[str], body: Callable[[Any], int]) -> int:
    """``body`` with the communicator of this job's ranks, who meet in ``args.meeting``; its exit status.

    ``what`` they share, for the first line, in which rank 0 says who they are; ``sources`` are what is walked. What
    ends the job is told once: by rank 0, unless it is rank 0 that has failed or died.
    """
    from mlperf_common.distributed.communicator import MeetingError, RankFailed
    from mlperf_common.distributed.launch import LaunchError, detect

    try:
        mine = detect(os.environ)
    except LaunchError as exc:
        command.say(program, str(exc))
        return 1
    if mine.rank == 0 and not args.quiet:
        how = WORDS[args.distributed] % what if mine.world_size > 1 else "there are no other ranks"
        command.say(program, "rank 0 of %d (%s): %s" % (mine.world_size, mine.launcher, how))
    problem = _check_meeting(args.meeting, sources) if mine.world_size > 1 else ""
    if problem:
        command.say(program, problem)
        return 1
    try:
        with _communicator(mine, args) as comm:
            return _speak(program, comm, body)
    except (LaunchError, MeetingError) as exc:
        command.say(program, str(exc))
    except RankFailed as exc:  # while they met
        if 0 in (mine.rank, exc.rank):
            command.say(program, "the job ends: %s" % exc)
    return 1


def _speak(program: str, comm: Any, body: Callable[[Any], int]) -> int:
    """The body's status. What there is to say is said before the other ranks know: a launcher ends all ranks as soon as
    one has a status of 1 (ran: mpirun)."""
    from mlperf_common.distributed.communicator import RankFailed

    try:
        return body(comm)
    except RankFailed as exc:
        if 0 in (comm.rank, exc.rank):
            command.say(program, "the job ends: %s" % exc)
    except Exception as exc:
        command.explain(program, exc)
        comm.fail(_words(exc))
    return 1


@contextmanager
def _communicator(mine: Any, args: Any) -> Iterator[Any]:
    from mlperf_common.distributed import communicator, launch

    if mine.world_size == 1:
        yield communicator.Single()
        return
    if not mine.job and args.rendezvous is None:
        raise launch.LaunchError(
            "%s gives its jobs no name: say --rendezvous DIR, an empty directory that all ranks share" % mine.launcher
        )
    with communicator.Files(mine, args.meeting, dead=args.rank_timeout) as comm:
        yield comm


def _check_meeting(meeting: str, sources: Sequence[str]) -> str:
    """What is wrong with the place, or nothing: below a source what the ranks put there would be found."""
    try:
        above = copyplan.ancestors(meeting)
    except OSError as exc:
        return "the ranks cannot meet in %s: %s" % (quote(meeting), reason_of(exc))
    for source in sources:
        try:
            st = os.stat(source)
        except OSError:  # who reads it will say so
            continue
        if stat.S_ISDIR(st.st_mode) and (st.st_dev, st.st_ino) in above:
            where = quote(meeting), quote(source)
            return "the ranks would meet in %s, which is %s or below it: say --rendezvous DIR" % where
    return ""


def _look_at_ranks(pool: AnyPool, comm: Any) -> None:
    """Look at the other ranks whenever the pool looks at the clock, before whatever else is done then."""
    show = pool.on_tick

    def tick() -> None:
        comm.check()
        show()

    pool.on_tick = tick


@contextmanager
def _crew(comm: Any, directory: str, prefix: str) -> Iterator[Crew]:
    """All ranks as one crew, with a directory of theirs below ``directory``."""
    from mlperf_common.distributed.tempdir import shared_tempdir
    from mlperf_common.fileio import sharing

    with shared_tempdir(comm, dir=directory, prefix=prefix) as place, _opened(place) as fd:
        yield sharing.Crew(comm.rank, comm.world_size, fd, comm.barrier, comm.check)


# ------------------------------------------------------------------------------------------ lists and comparisons


def list_files(
    comm: Any,
    meeting: str,
    pool: AnyPool,
    roots: Roots,
    find: Callable[[Any], Any],
    events: Any,
    summary: Any,
    follow: Callable[[Any, Any], None],
) -> bool:
    """Take part in a list of checksums; whether it is complete. In rank 0 ``summary`` has the counts at the end.

    ``find`` finds what is to be hashed with the lister that it gets, in rank 0 alone. ``follow`` gets what it has found
    (or None) and the summary of this rank's own part, when that begins.
    Raises DigestRefused, AllWorkersDied, RankFailed, OSError.
    """
    from mlperf_common.fileio import checksum, hashsharing
    from mlperf_common.fileio.claims import Publisher
    from mlperf_common.fileio.walksharing import shared_walk

    _look_at_ranks(pool, comm)
    with _crew(comm, meeting, ".fastmd5-job-") as crew:
        publisher = Publisher(crew.place) if comm.rank == 0 else None
        with shared_walk(crew, pool, roots) as lister:
            found = find(lister) if lister is not None else None
        count = 0
        if publisher is not None and found is not None:
            summary.files_total, summary.bytes_total = found.files, found.bytes
            summary.problems += found.problems
            count = hashsharing.publish(found, crew, publisher)
        own = checksum.HashSummary()
        follow(found, own)
        hashsharing.work(crew, pool, roots, True, own)
        reads = comm.gather(hashsharing.how_read(own))
        if comm.rank == 0:
            hashsharing.tell(crew.place, count, events, summary)
            hashsharing.add_reads(summary, reads)
    return bool(comm.broadcast(summary.is_complete()))


def compare(
    comm: Any,
    meeting: str,
    pool: AnyPool,
    roots: Roots,
    request: Any,
    events: Any,
    counts: Any,
    follow: Callable[[Any, Any], None],
) -> bool:
    """Take part in a comparison; whether nothing differs. In rank 0 ``counts`` has the sums at the end.

    ``follow`` gets the lister when listing begins (in rank 0), then None and the counts of this rank's own part.
    Raises AllWorkersDied, RankFailed, OSError.
    """
    from mlperf_common.fileio import comparing, pairsharing
    from mlperf_common.fileio.walksharing import shared_walk

    _look_at_ranks(pool, comm)
    with _crew(comm, meeting, ".fastmd5-job-") as crew:
        own = comparing.Counts()
        lead = pairsharing.Lead(crew, pool, roots, comm.gather, own) if comm.rank == 0 else None
        with shared_walk(crew, pool, roots) as lister:
            if lead is None or lister is None:
                follow(None, own)
                comm.gather(pairsharing.work(request, crew, pool, roots, own))
            else:
                follow(lister, own)
                after = lead.compare_after(_both(lister.finish, lambda: follow(None, own)))
                comparing.compare(request, pool, roots, lister, events, counts, after)
    return bool(comm.broadcast(counts.is_identical()))


def _both(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        then()

    return call


# ------------------------------------------------------------------------------------------------------ the copy


class Copy(NamedTuple):
    """What a copy is made with, by whoever reads the command line."""

    args: Any
    pool: AnyPool
    roots: Roots
    events: Events
    plan: Callable[[Any], CopyPlan]  # gets a lister
    tell: Callable[[CopyPlan], bool]  # what is to be said of a plan; False: nothing is to be copied
    options: Callable[[], Options]
    follow: Callable[[Optional[CopyPlan], int, Summary], None]  # so many copies of this plan begin; this rank's summary


class Outcome(NamedTuple):
    """What a rank knows at the end: whether all is complete, and in rank 0 the summary of it all."""

    complete: bool
    summary: Optional[Summary] = None


def copy(job: Copy, comm: Any) -> Outcome:
    """Take part in a copy. Raises CopyArgumentError (rank 0), RankFailed, OSError, Interrupted, AllWorkersDied."""
    _look_at_ranks(job.pool, comm)
    return _copy_on_nodes(job, comm) if job.args.distributed == NODE else _copy_as_one(job, comm)


class Planned(NamedTuple):
    """A plan, or why there is none; neither where a rank does not plan."""

    plan: Optional[CopyPlan] = None
    error: Optional[Exception] = None


def _try(job: Copy, lister: ListDirectories) -> Planned:
    try:
        return Planned(job.plan(lister))
    except (CopyArgumentError, UnreadableEntries, OSError) as exc:
        return Planned(None, exc)


def _copy_as_one(job: Copy, comm: Any) -> Outcome:
    """All ranks share DEST: rank 0 leads."""
    with _crew(comm, job.args.meeting, ".fastcp-job-") as crew:
        return _copy_by(job, comm, crew)


def _copy_by(job: Copy, comm: Any, crew: Crew) -> Outcome:
    from mlperf_common.fileio.walksharing import shared_walk

    with shared_walk(crew, job.pool, job.roots) as lister:
        planned = _try(job, lister) if lister is not None else Planned()
    plan = planned.plan
    wanted = plan is not None and job.tell(plan)
    refused, base = comm.broadcast([planned.error is not None, plan.base.path if plan is not None and wanted else ""])
    if planned.error is not None:
        for line in command.lines_of(planned.error):
            job.events.problem(line)
    if refused or not base:
        return Outcome(not refused)
    if not _is_shared(base, comm, job.events):
        return Outcome(False)
    summary = _work(job, plan, crew, 1)
    return Outcome(bool(comm.broadcast(summary.is_complete())), summary)


def _work(job: Copy, plan: Optional[CopyPlan], crew: Crew, copies: int) -> Summary:
    """Lead those who share a DEST, or be one of them."""
    from mlperf_common.fileio import sharing, transfer
    from mlperf_common.fileio.report import Summary

    summary = Summary()
    job.follow(plan, copies, summary)
    if plan is None:
        sharing.help_out(crew, job.pool, job.roots, job.events, summary)
    else:
        transfer.copy(plan, job.pool, job.roots, job.options(), job.events, summary, crew=crew)
    return summary


@contextmanager
def _opened(path: str, above: Optional[int] = None) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_shared(base: str, comm: Any, events: Events) -> bool:
    """Whether every rank finds in ``base`` a file that rank 0 has just made there; if not, rank 0 says so."""
    made, strangers = "", []
    try:
        probe = [os.path.join(base, ".fastcp-probe-%s" % os.urandom(8).hex()), os.urandom(16).hex()]
        if comm.rank == 0:
            _write_new(*probe)
            made = probe[0]
        name, text = comm.broadcast(probe)
        hosts = comm.gather("" if _holds(name, text) else socket.gethostname())
        strangers = comm.broadcast(sorted({host for host in hosts if host}) if comm.rank == 0 else None)
    finally:
        if made:
            os.unlink(made)
    if strangers and comm.rank == 0:
        events.problem(
            "%s is another directory on %s: --distributed=node makes a copy on each node"
            % (quote(base), ", ".join(strangers[:5]) + ("..." if len(strangers) > 5 else ""))
        )
    return not strangers


def _write_new(name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as stream:
        stream.write(text)


def _holds(name: str, text: str) -> bool:
    try:
        with open(name, encoding="ascii") as stream:
            return stream.read() == text
    except OSError:
        return False


# --------------------------------------------------------------------------------------------- a copy on each node


def _copy_on_nodes(job: Copy, comm: Any) -> Outcome:
    """Each node has its own DEST, and its first rank leads there."""
    from mlperf_common.fileio import sharing

    group, nodes = _group(comm)
    leads = comm.rank == group[0]
    if comm.rank:
        job = job._replace(events=sharing.Said(job.events))
    with _crew(comm, job.args.rendezvous, ".fastcp-job-") as everybody:
        mine = "node-%d" % group[0]
        if leads:
            os.mkdir(mine, 0o700, dir_fd=everybody.place)
        planned = _plan_on_nodes(job, comm, everybody, leads)
        plan = planned.plan
        refused = _tell_refusals(job, comm, planned.error)
        if not comm.broadcast(not refused and plan is not None and job.tell(plan)):
            return Outcome(not refused)
        with _opened(mine, everybody.place) as fd:
            number = group.index(comm.rank)
            crew = sharing.Crew(number, len(group), fd, comm.barrier, comm.check, checks_sources=comm.rank == 0)
            summary = _work(job, plan, crew, nodes)
        others = comm.gather(_told(summary, job.events) if leads and comm.rank else None)
    if comm.rank == 0:
        _add_up(summary, job.events, others)
    return Outcome(bool(comm.broadcast(summary.is_complete())), summary)


def _plan_on_nodes(job: Copy, comm: Any, crew: Crew, leads: bool) -> Planned:
    """Rank 0 leads the walk of the source and writes down what it finds; the other nodes' leaders plan by that."""
    from mlperf_common.fileio.listing import PoolLister
    from mlperf_common.fileio.rewalk import Recording, Replay
    from mlperf_common.fileio.walksharing import shared_walk

    planned = Planned()
    with shared_walk(crew, job.pool, job.roots) as lister:
        if lister is not None:
            with _stream("recorded", crew, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as stream:
                planned = _try(job, Recording(lister, stream))
    if comm.broadcast(planned.error is None) and leads and comm.rank:
        with _stream("recorded", crew, os.O_RDONLY) as stream:
            planned = _try(job, Replay(PoolLister(job.pool, job.roots), stream))
    return planned


def _stream(name: str, crew: Crew, flags: int) -> IO[str]:
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=crew.place)
    return open(fd, "r" if flags == os.O_RDONLY else "w", encoding="ascii")


def _tell_refusals(job: Copy, comm: Any, error: Optional[Exception]) -> bool:
    """Whether any node cannot make its copy; rank 0 says which, and why."""
    said = comm.gather("" if error is None else "node %s: %s" % (socket.gethostname(), _words(error)))
    if comm.rank == 0:
        for line in said:
            if line:
                job.events.problem(line)
    return bool(comm.broadcast(any(said) if comm.rank == 0 else None))


def _words(error: Exception) -> str:
    return reason_of(error) if isinstance(error, OSError) else str(error)


def _group(comm: Any) -> Tuple[List[int], int]:
    """The ranks of this node, in order; how many nodes there are."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        node = "%s %s" % (socket.gethostname(), stream.read().strip())
    nodes = comm.broadcast(comm.gather(node))
    return [rank for rank, other in enumerate(nodes) if other == node], len(set(nodes))


def _told(summary: Summary, events: Events) -> Any:
    """What the leader of another node has to say."""
    from mlperf_common.fileio.sharing import Said

    lines = [*events.failures, *events.problems] if isinstance(events, Said) else []
    return [socket.gethostname(), {name: getattr(summary, name) for name in COUNTS}, summary.stopped, lines]


COUNTS = ("files", "links", "directories", "bytes", "failed", "problems", "not_tried", "same", "unchanged", "outside")


def _add_up(summary: Summary, events: Events, others: Sequence[Any]) -> None:
    """All nodes' counts together, and what went wrong on each."""
    for told in others:
        if told is None:
            continue
        host, counts, stopped, lines = told
        for name, count in counts.items():
            setattr(summary, name, getattr(summary, name) + count)
        if stopped:
            summary.stop("node %s: %s" % (host, stopped))
        for line in lines:
            events.problem("node %s: %s" % (host, line if isinstance(line, str) else _failure(*line)))


def _failure(source: str, destination: str, reason: str) -> str:
    return "cannot copy %s to %s: %s" % (quote(source), quote(destination), reason)
