# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The fastcp command line: arguments -> plan -> copy -> one summary line and an exit status.

stdout carries only what was asked for (--dry-run's plan); all else goes to stderr.
"""

from __future__ import annotations

import argparse
import errno
import os
import time

from mlperf_common import __version__
from mlperf_common.fileio import command, joining, session
from mlperf_common.fileio.progress import counted, format_bytes, format_rate, format_seconds
from mlperf_common.fileio.report import Events, Summary
from mlperf_common.fileio.words import quote, reason_of

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence, Tuple

    from mlperf_common.fileio.choosing import Choice
    from mlperf_common.fileio.copyplan import CopyPlan
    from mlperf_common.fileio.facts import Options
    from mlperf_common.fileio.listing import AnyPool, Roots
    from mlperf_common.fileio.outcome import Outcome
    from mlperf_common.fileio.recording import Recorder

PROGRAM = "fastcp"

ATTRIBUTES = ("mode", "ownership", "timestamps", "links", "xattr")  # what --preserve may name

USAGE = """fastcp [OPTION]... SOURCE DEST
       fastcp [OPTION]... SOURCE... DIRECTORY
       fastcp [OPTION]... -t DIRECTORY SOURCE..."""

DESCRIPTION = "Copy files and trees as cp -rL, many at once; status 0: complete and identical."


def make_parser() -> command.Parser:
    """The options of fastcp. Each phrase fits its line; README.md and the man page say more."""
    parser = command.Parser(PROGRAM, version=__version__, usage=USAGE, description=DESCRIPTION)
    _add_selection(parser.add_argument_group("what is copied").add_argument)
    add = parser.add_argument_group("what exists already, and what is kept").add_argument
    add("-f", "--force", action="store_true", help="replace files that exist")
    add("-u", "--update", action="store_true", help="leave files of the same size, not older")
    add("--checksum", action="store_true", help="with -u: compare bytes, whatever the times")
    _add_metadata_options(add)
    _add_way_options(parser.add_argument_group("how bytes move"))
    add = parser.add_argument_group("proof").add_argument
    add("--verify", action="store_true", help="read back every file before it gets its name")
    add("--manifest", metavar="FILE", action=command.Once, help="write checksums to FILE, as fastmd5 --all would")
    add("--resume", action="store_true", help="go on with large files where a run was ended")
    add("--fsync", action="store_true", help="write all to the storage before the end")
    nodes = parser.add_argument_group("several nodes")
    joining.add_options(nodes, (joining.JOB, joining.NODE), "where ranks meet (default: beside DEST or in it)")
    _add_output_options(parser.add_argument_group("what is said"))
    return parser


def _add_selection(add: Any) -> None:
    add("-r", "-R", "--recursive", action="store_true", help="directories and all that is below them")
    add("-t", "--target-directory", metavar="DIR", action=command.Once, help="copy all SOURCEs into DIR")
    add("-T", "--no-target-directory", action="store_true", help="DEST is the copy's name, even if it exists")
    for letter, name, follow, words in (
        ("P", "--no-dereference", "none", "copy symbolic links as links"),
        ("L", "--dereference", "all", "follow symbolic links (default)"),
        ("H", None, "operands", "follow only links that are operands"),
    ):
        names = ["-" + letter] + ([name] if name else [])
        add(*names, action="store_const", const=follow, dest="follow", default="all", help=words)
    add("-x", "--one-file-system", action="store_true", help="stay out of what is mounted below")
    add("--exclude", metavar="GLOB", action="append", type=_exclusion, help="leave out what matches, by rsync's rules")
    add("--files-from", metavar="FILE", action=command.Once, help="only what FILE (-: stdin) names below SOURCE")
    add("-0", "--null", action="store_true", help="names in that FILE end with NUL")
    add("--skip-special", action="store_true", help="leave out FIFOs, sockets and devices")


def _add_way_options(group: Any) -> None:
    session.add_pool_options(group, "bytes at a time of each (default: 8M)", command.buffer_size)
    add = group.add_argument
    _add_choice(add, "direct", ("auto", "always", "never"), "O_DIRECT: auto (default), always, never")
    _add_choice(add, "sparse", ("auto", "never"), "holes stay: auto (default); are filled: never")
    _add_choice(add, "reflink", ("auto", "always", "never"), "share blocks: auto (default), always, never")
    add("--ignore-times", action="store_true", help="see by size and inode if a source changes")


def _add_output_options(group: Any) -> None:
    add = group.add_argument
    add("-N", "--dry-run", action="store_true", help="print what would be copied; write nothing")
    add("-v", "--verbose", action="store_true", help="name each file when it has been copied")
    add("-q", "--quiet", action="store_true", help="print nothing but errors and warnings")
    session.add_progress_option(group)
    add("--json", action="store_true", help="print one object at the end: counts, errors")
    add("--failed-list", metavar="FILE", action=command.Once, help="write the names of what failed, NUL-ended")


def _add_metadata_options(add: Any) -> None:
    words = "same as -r -P --preserve=all"
    add("-a", "--archive", nargs=0, action=_Archive, dest="kept", default={}, help=words)
    add("-p", nargs=0, action=_Preserve, dest="kept", help="same as --preserve=mode,ownership,timestamps")
    add(
        "--preserve",
        nargs="?",
        metavar="LIST",
        action=_Preserve,
        dest="kept",
        help="mode,ownership,timestamps,links,xattr,all",
    )
    add("--no-preserve", metavar="LIST", action=_NoPreserve, dest="kept", help="do not keep what LIST names")


def _exclusion(text: str) -> str:
    if not text.strip("/"):
        raise argparse.ArgumentTypeError("an empty pattern")
    return text


def _add_choice(add: Any, name: str, choices: Sequence[str], words: str) -> None:
    add("--" + name, metavar="WHEN", choices=choices, default="auto", help=words)


class _Preserve(argparse.Action):
    """Adds to what is kept; without a list, as cp does, mode, ownership and timestamps."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Optional[str] = None) -> None:
        names = ["mode", "ownership", "timestamps"] if values in (None, []) else _names(self, values)
        changes: Dict[str, bool] = dict.fromkeys(ATTRIBUTES if "all" in names else names, True)
        changes["xattr_required"] = namespace.kept.get("xattr_required", False) or "xattr" in names
        if "mode" in changes:
            changes["default_mode"] = False
        namespace.kept = {**namespace.kept, **changes}


class _NoPreserve(argparse.Action):
    """Takes from what is kept; without the mode, new files get that of any new file."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Optional[str] = None) -> None:
        names = _names(self, values)
        changes: Dict[str, bool] = dict.fromkeys(ATTRIBUTES if "all" in names else names, False)
        if "mode" in changes:
            changes["default_mode"] = True
        if "xattr" in changes:
            changes["xattr_required"] = False
        namespace.kept = {**namespace.kept, **changes}


class _Archive(argparse.Action):
    """-r -P --preserve=all, as cp's -a."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Optional[str] = None) -> None:
        namespace.recursive = True
        namespace.follow = "none"
        namespace.kept = {**namespace.kept, **dict.fromkeys(ATTRIBUTES, True), "default_mode": False}


def _names(action: argparse.Action, text: str) -> List[str]:
    names = text.split(",")
    for name in names:
        if name not in (*ATTRIBUTES, "all"):
            raise argparse.ArgumentError(action, "not one of %s, all: %s" % (", ".join(ATTRIBUTES), quote(name)))
    return names


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run fastcp on ``argv`` (default: the command line's) and return its exit status: 0, 1 or 2."""
    return command.run(PROGRAM, _body, argv)


def _body(argv: Sequence[str]) -> int:
    parser = make_parser()
    args = command.parse(parser, argv)
    sources, destination = _operands(parser, args)
    if args.distributed is not None:
        joining.settle_meeting(args, destination)
    session.settle_workers(PROGRAM, args)
    _settle_buffer(args)
    console = _Console(args)
    if not args.json and args.failed_list is None:
        return _start(args, sources, destination, console)
    from mlperf_common.fileio import outcome

    console.outcome = outcome.Outcome()
    if args.distributed is not None:
        console.outcome.leads = joining.is_first()
    return outcome.run(
        PROGRAM, args, sources, console.outcome, lambda: _start(args, sources, destination, console)
    )


def _start(args: Any, sources: Sequence[str], destination: str, console: _Console) -> int:
    from mlperf_common.fileio import copytasks

    with session.open_pool(PROGRAM, args, copytasks.FUNCTIONS, sources) as pool:
        if args.distributed is None:
            return _run(args, sources, destination, pool, console)
        from mlperf_common.fileio import together

        return together.run(
            PROGRAM, args, "DEST", sources, lambda comm: _run_as_rank(args, sources, destination, pool, comm, console)
        )


def _refuse_conflicts(parser: command.Parser, args: Any) -> None:
    """Options that contradict each other are a usage error."""
    if args.quiet and args.verbose:
        parser.error("cannot combine --quiet (-q) and --verbose (-v)")
    if args.checksum and not args.update:
        parser.error("--checksum needs --update (-u)")
    if args.reflink == "always" and args.sparse == "never":
        parser.error("cannot combine --reflink=always and --sparse=never")
    for name in ("verify", "manifest"):
        if args.reflink == "always" and getattr(args, name):
            parser.error("cannot combine --reflink=always and --%s" % name)
    joining.refuse_conflicts(parser, args, ("manifest", "resume"))
    _refuse_choices(parser, args)
    if args.target_directory is not None and args.no_target_directory:
        parser.error("cannot combine --target-directory (-t) and --no-target-directory (-T)")


def _refuse_choices(parser: command.Parser, args: Any) -> None:
    if args.null and args.files_from is None:
        parser.error("--null (-0) needs --files-from")
    if args.files_from is not None and not args.recursive:
        parser.error("--files-from needs --recursive (-r)")
    if args.files_from == "-" and args.distributed == joining.NODE:
        parser.error("cannot combine --files-from=- and --distributed=node: each node reads the names")
    if args.json and args.dry_run:
        parser.error("cannot combine --json and --dry-run (-N)")
    for name in ("files_from", "failed_list"):
        if getattr(args, name) is not None and len(args.operands) - (args.target_directory is None) > 1:
            parser.error("--%s needs one SOURCE" % name.replace("_", "-"))


def _operands(parser: command.Parser, args: Any) -> Tuple[List[str], str]:
    """SOURCEs and DEST by cp's three forms; anything else is a usage error, in cp's words."""
    operands: List[str] = args.operands
    _refuse_conflicts(parser, args)
    if not operands:
        parser.error("missing file operand")
    if args.target_directory is not None:
        return operands, args.target_directory
    if len(operands) == 1:
        parser.error("missing destination file operand after %s" % quote(operands[0]))
    if args.no_target_directory and len(operands) > 2:
        parser.error("extra operand %s" % quote(operands[2]))
    return operands[:-1], operands[-1]


def _settle_buffer(args: Any) -> None:
    """Clamp the buffer, with a note; round it up to a multiple of 2 MiB, said under -v."""
    args.buffer_size, note = command.clamp(args.buffer_size, command.MAX_BUFFER_SIZE, "buffer size")
    if note:
        command.say(PROGRAM, note)
    from mlperf_common.fileio import direct_io  # late, as all that --help and a usage error do not need

    rounded = direct_io.round_up(args.buffer_size, direct_io.BUFFER_ALIGN)
    if args.verbose and rounded != args.buffer_size:
        command.say(PROGRAM, "note: buffer size: %d is rounded up to %d" % (args.buffer_size, rounded))
    args.buffer_size = rounded


def _run(args: Any, sources: Sequence[str], destination: str, pool: AnyPool, console: _Console) -> int:
    from mlperf_common.fileio import transfer
    from mlperf_common.fileio.listing import PoolLister, Roots
    from mlperf_common.fileio.recording import Recorder

    started = time.monotonic()
    roots = Roots(pool)
    with console.watch(roots, "what is there so far is whole"):
        lister = PoolLister(pool, roots)
        console.plan(pool, lister.found)
        plan = _plan(args, sources, destination, lister)
        console.tell(plan)
        if args.manifest is not None:
            from mlperf_common.fileio import copymanifest

            copymanifest.check_place(args.manifest, plan, args.force)
        if args.dry_run:
            console.clear()
            _print_plan(plan)
            return 0
        summary = Summary()
        console.note(plan, summary)
        size, files = plan.size(), len(plan.files)
        console.follow(pool, lambda: (size, summary.files, files))
        options = _options(args)
        recorder = Recorder(options.digests)
        transfer.copy(plan, pool, roots, options, console, summary, recorder)
        if args.manifest is not None and summary.is_complete():
            _write_manifest(args, plan, recorder, (pool, roots), console, summary)
    console.conclude(summary, time.monotonic() - started)
    return 0 if summary.is_complete() else 1


def _run_as_rank(
    args: Any, sources: Sequence[str], destination: str, pool: AnyPool, comm: Any, console: _Console
) -> int:
    """The same as one of several ranks: rank 0 says how it went."""
    from mlperf_common.fileio import together
    from mlperf_common.fileio.listing import Roots

    started = time.monotonic()
    roots = Roots(pool)
    console.join(comm)
    with console.watch(roots, "what is there so far is whole"):

        def tell(plan: CopyPlan) -> bool:
            console.tell(plan)
            console.note(plan, None)
            if args.dry_run:
                console.clear()
                _print_plan(plan)
            return not args.dry_run

        def plan(lister: Any) -> CopyPlan:
            if comm.rank == 0:
                console.plan(pool, lister.found)
            return _plan(args, sources, destination, lister)

        def follow(plan: Optional[CopyPlan], copies: int, summary: Summary) -> None:
            size, files = (copies * plan.size(), copies * len(plan.files)) if plan is not None else (0, 0)
            console.follow(pool, lambda: (size, summary.files, files))

        job = together.Copy(
            args,
            pool,
            roots,
            console,
            plan,
            tell,
            lambda: _options(args),
            follow,
        )
        outcome = together.copy(job, comm)
    if comm.rank == 0 and outcome.summary is not None:
        console.note(None, outcome.summary)
        console.conclude(outcome.summary, time.monotonic() - started)
    return 0 if outcome.complete else 1


def _plan(args: Any, sources: Sequence[str], destination: str, list_directories: Any) -> CopyPlan:
    from mlperf_common.fileio import copyplan

    return copyplan.plan_copy_operations(
        sources,
        destination,
        recursive=args.recursive,
        into_directory=args.target_directory is not None,
        no_target_directory=args.no_target_directory,
        force=args.force,
        skip_special=args.skip_special,
        list_directories=list_directories,
        follow=args.follow,
        one_file_system=args.one_file_system,
        update=args.update,
        checksum=args.checksum,
        keep_links=bool(args.kept.get("links")),
        ignore_times=args.ignore_times,
        choice=_choice(args),
    )


def _choice(args: Any) -> Optional[Choice]:
    """What is wanted of the source, where it is not everything. Raises OSError, NotBelow."""
    if args.exclude is None and args.files_from is None:
        return None
    from mlperf_common.fileio import choosing

    names = None
    if args.files_from is not None:
        # Descriptor 0 and not sys.stdin, which is None where that was closed.
        stdin = args.files_from == "-"
        with open(0 if stdin else args.files_from, "rb", closefd=not stdin) as stream:
            found = choosing.read_names(stream, b"\0" if args.null else b"\n")
        names = choosing.tree_of(found, args.files_from)
    return choosing.Choice([choosing.Exclusion(pattern) for pattern in args.exclude or ()], names)


def _options(args: Any) -> Options:
    from mlperf_common.fileio.facts import Options
    from mlperf_common.fileio.metadata import Kept

    return Options(
        os.urandom(5).hex(),
        args.force,
        Kept(**args.kept),
        args.ignore_times,
        args.direct,
        args.sparse,
        args.reflink,
        args.fsync,
        args.manifest is not None,
        args.verify,
        args.resume,
    )


def _write_manifest(
    args: Any, plan: CopyPlan, recorder: Recorder, where: Tuple[AnyPool, Roots], console: _Console, summary: Summary
) -> None:
    """What -u left alone is read for it; then the manifest gets its name. What goes wrong makes the run fail."""
    from mlperf_common.fileio import checksum, copymanifest
    from mlperf_common.fileio.digest import DigestRefused
    from mlperf_common.fileio.workers import AllWorkersDied

    pool, roots = where
    rest = copymanifest.Rest(plan, recorder)
    try:
        checksum.hash_files(rest, pool, roots, rest, checksum.HashSummary())
    except (AllWorkersDied, DigestRefused) as exc:
        summary.problems += 1
        return console.problem(str(exc))
    for path, reason in rest.failures:
        summary.problems += 1
        console.problem("cannot hash %s for the manifest: %s" % (quote(path), reason))
    if rest.failures:
        return None
    if not copymanifest.is_complete(plan, recorder):
        summary.problems += 1
        return console.problem("the manifest would not be complete: it is not written")
    try:
        copymanifest.write(args.manifest, os.urandom(5).hex(), copymanifest.lines(plan, recorder), args.force)
    except OSError as exc:
        summary.problems += 1
        console.problem("cannot write the manifest %s: %s" % (quote(args.manifest), reason_of(exc)))


def _print_plan(plan: CopyPlan) -> None:
    """The plan on stdout: a line for each directory that is needed and for each file, names quoted."""
    out = command.stdout()
    for path in plan.directories:
        out.write(os.fsencode("directory %s\n" % quote(path)))
    for source, destination, size in plan.files:
        out.write(os.fsencode("file %s -> %s (%s)\n" % (quote(source), quote(destination), counted(size, "byte"))))
    for source, destination in plan.links:
        out.write(os.fsencode("link %s -> %s\n" % (quote(source), quote(destination))))


class _Console(session.Console, Events):
    """The lines of a copy. ``outcome`` collects what is told at the end, if that is wanted."""

    def __init__(self, args: Any) -> None:
        self.outcome: Optional[Outcome] = None
        self._base = ""
        self._args = args
        super().__init__(PROGRAM, args.quiet, session.display_mode(args), "copying")
        self.verbose = args.verbose

    def copied(self, source: str, destination: str) -> None:
        self.say("%s -> %s" % (quote(source), quote(destination)))

    def linked(self, source: str, destination: str) -> None:
        self.copied(source, destination)

    def resumed(self, source: str, count: int) -> None:
        self._moved += 0 if self._args.manifest or self._args.verify else count  # else they are read again
        if not self.quiet:
            self.say("note: %s: %s were there from an earlier run" % (quote(source), format_bytes(count)))

    def note(self, plan: Optional[CopyPlan], summary: Optional[Summary]) -> None:
        """Keep a plan, a summary, for the outcome. Raises ManifestInTheWay: the list of failures cannot go there."""
        if self.outcome is None:
            return
        if plan is not None and self._args.failed_list is not None:
            from mlperf_common.fileio import copymanifest

            self.outcome.may_list = False
            copymanifest.check_place(self._args.failed_list, plan, self._args.force, "list of failures")
            self.outcome.may_list = True
        self.outcome.plan = plan or self.outcome.plan
        self.outcome.summary = summary or self.outcome.summary

    def problem(self, line: str) -> None:
        super().problem(line)
        if self.outcome is not None:
            self.outcome.lines.append(line)

    def tell(self, plan: CopyPlan) -> None:
        """What the plan leaves out, or meets on its way."""
        self._base = plan.base.path
        for path, kind in plan.skipped:
            self.skipped(path, kind)
        if self.verbose:
            for path in plan.mounts:
                self.say("note: another filesystem is mounted on %s" % quote(path))
            from mlperf_common.fileio import stripes

            note = stripes.stripe_note(plan.base.path)
            if note:
                self.say("note: %s: %s" % (quote(plan.base.path), note))

    def failed(self, source: str, destination: str, reason: str) -> None:
        if self.outcome is not None:
            self.outcome.failures.append((source, reason))
        self.say("cannot copy %s to %s: %s" % (quote(source), quote(destination), reason))

    def conclude(self, summary: Summary, seconds: float) -> None:
        """The last line: what was done, and first of all whether anything is missing."""
        done = "%s in %s, %s, io=%s%s" % (
            ", ".join(_done(summary)),
            format_seconds(seconds),
            format_rate(summary.bytes, seconds),
            summary.io_mode(),
            "".join("; " + text for text in _besides(summary)),
        )
        if summary.is_complete():
            if not self.quiet:
                self.say(done)
            return
        if summary.stopped:
            self.say("stopped early: %s%s" % (summary.stopped, _next_step(summary.stopped, self._base)))
        missing = summary.failed + summary.not_tried
        other = ", %s" % counted(summary.problems, "other problem") if summary.problems else ""
        total = counted(summary.tried() + summary.not_tried, "file")  # of all nodes, where there are several
        self.say("FAILED: %d of %s not copied%s; %s" % (missing, total, other, done))


def _next_step(reason: str, base: str) -> str:
    """What to look at when there is no room, where more is known than the system's words."""
    if reason == os.strerror(errno.EDQUOT):
        return " (quota -s shows yours; lfs quota on Lustre, mmlsquota on GPFS)"
    if reason != os.strerror(errno.ENOSPC) or not base:
        return ""
    try:
        room = os.statvfs(base)
    except OSError:  # it was to say more, not to add a problem
        return ""
    if room.f_files and not room.f_favail:
        return " (no inodes are left: df -i)"
    return ""


def _done(summary: Summary) -> List[str]:
    links = [counted(summary.links, "link")] if summary.links else []
    return [
        counted(summary.files, "file"),
        *links,
        counted(summary.directories, "directory"),
        format_bytes(summary.bytes),
    ]


def _besides(summary: Summary) -> List[str]:
    """What else is to be known of a run, where it is not nothing."""
    counts = (
        (summary.from_cache, "verified from cache"),
        (summary.unchanged, "%d skipped, unverified"),
        (summary.same, "%d skipped, compared and the same"),
        (summary.resumed, "bytes from earlier runs: %d"),
        (summary.left_behind, "temporary files of other runs: %d"),
        (summary.outside, "links that lead out of the tree: %d"),
        (summary.split, "hard links copied as files of their own: %d"),
    )
    return [text % number if "%" in text else text for number, text in counts if number]
