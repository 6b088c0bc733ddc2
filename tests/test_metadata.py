# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a copy keeps besides bytes: modes, owners, times, ACLs, extended attributes. Against the real cp."""

# Takes about 15 s
from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from typing import Any, ClassVar, Dict, List, Sequence, Tuple

import keeping
import support
from keeping import Looks, looks, run_cp, run_fastcp, shell
from support import Dir, File, Link, Random, TestCase, needs, needs_nobody, needs_root, run_tool, slow

MIB = 1 << 20
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service=ep, see capability.h

TREE = {
    "plain": File(b"1", mode=0o640),
    "setid": File(b"2", mode=0o6755),
    "owned": File(b"3", mode=0o7777),
    "readonly": File(b"4", mode=0o400),
    "nothing": File(b"5", mode=0),
    "open": File(b"6", mode=0o777),
    "empty": File(b"", mode=0o664),
    "acl": File(b"7", mode=0o660),
    "able": File(b"8", mode=0o755),
    "private": Dir({"f": b"9", "deep": Dir({"g": b"10"}, mode=0o555)}, mode=0o700),
    "sticky": Dir({}, mode=0o1777),
    "setgid": Dir({"h": b"11", "d": Dir({}, mode=0o2750)}, mode=0o2775),
    "defaults": Dir({"d": {"i": b"12"}}, mode=0o770),
    "unwritable": Dir({"j": File(b"13", mode=0o444)}, mode=0o500),
    "link": Link("plain"),
    "dangling": Link("nowhere"),
    "direct": Random(MIB + 1, seed=1),
}
# Owners of the kind that this machine need not know; ACLs with a mask below the group's bits; what is not copied too.
DRESSED = """
chown 1234:2345 plain owned private; chmod 7777 owned; chown 1234:2345 -h link dangling
chown :2345 setgid setgid/h setgid/d; chmod 2775 setgid; chmod 2750 setgid/d; chmod 640 setgid/h
setfacl -m u:daemon:rw,g:bin:r,m::r acl; setfacl -m u:daemon:rwx private/f
setfacl -d -m u:daemon:rwx,g:bin:r-x,o::--- defaults; setfacl -m g:bin:rwx defaults; setfacl -m u:bin:r defaults/d
setfattr -n user.colour -v blue readonly; setfattr -n user.empty empty
setfattr -n user.long -v $(printf %01000d 7) open
setfattr -n user.dir -v x sticky; setfattr -n user.both -v 1 acl
setfattr -n trusted.secret -v x plain; setfattr -n trusted.secret -v x sticky
ln plain private/deep/twin; ln -P link link-twin
"""
MOMENTS = (-315521755_123456789, 4102444800_987654321, 1704164645_123456789, 1, 1700000000_000000001, -1, 0)


def make_source(case: TestCase) -> str:
    """The tree, in full dress."""
    source = case.make("source", TREE)
    shell(DRESSED, source)
    os.setxattr(os.path.join(source, "able"), "security.capability", CAPABILITY)
    everything = [os.path.join(d, n) for d, ds, fs in os.walk(source, topdown=False) for n in [*fs, *ds]] + [source]
    for path, moment in zip(everything, itertools.cycle(MOMENTS)):
        os.utime(path, ns=(moment + 5_000, moment), follow_symlinks=False)
    return source


def without_trusted(found: Looks) -> Looks:
    """cp -a as root copies ``trusted.*`` too, fastcp does not."""
    for entry in found.values():
        entry["attributes"] = {n: v for n, v in entry["attributes"].items() if not n.startswith("trusted.")}
    return found


# Options for both. Whether they keep times: the last word of these.
KEEP_TIMES = ("-a", "-p", "--preserve", "--preserve=timestamps", "--preserve=all")
OPTIONS = (
    "-r -P",
    "-a",
    "-r -P -p",
    "-r -L -p dangling",
    "-r -P --preserve",
    "-r -P --preserve=mode",
    "-r -P --preserve=ownership",
    "-r -P --preserve=timestamps",
    "-r -P --preserve=links",
    "-r -P --preserve=xattr",
    "-r -P --preserve=mode,ownership",
    "-r -P --preserve=ownership,xattr --preserve=timestamps",
    "-r -P --preserve=all",
    "-a --no-preserve=mode",
    "-a --no-preserve=ownership",
    "-a --no-preserve=timestamps",
    "-a --no-preserve=xattr",
    "-a --no-preserve=mode,ownership,links",
    "-a --no-preserve=all --preserve=timestamps",
    "-r -P --no-preserve=mode",
    "-r -P --no-preserve=mode --preserve=ownership",
    "-r -P --preserve=mode --no-preserve=mode",
    "-r -P --no-preserve=mode --preserve=mode",
)
FEWER = ("-r -P", "-a", "-r -P -p", "-r -P --preserve=ownership", "-r -P --preserve=xattr", "-a --no-preserve=mode")
# Under a default ACL cp takes write permission for the group from new directories, by the umask that does not count
# there, and under --no-preserve=mode takes the ACL away: see ``DefaultAcl``.
UNDER_ACL = ("-a", "-r -P -p", "-r -P --preserve=mode", "-r -P --preserve=ownership")
# What the directory that the copy lands in passes on, and the umask.
PLACES: Sequence[Tuple[str, int, Sequence[str]]] = (
    ("true", 0o022, OPTIONS),
    ("true", 0o077, FEWER),
    ("true", 0, FEWER),
    ("true", 0o277, FEWER),
    ("chown :bin . && chmod 2777 .", 0o027, FEWER),
    ("setfacl -d -m u:bin:rwx,g::---,o::--- .", 0o022, UNDER_ACL),
    ("setfacl -d -m u::rwx,g::rwx,o::rwx .; chmod 2777 .", 0o077, UNDER_ACL),
)


NOT_TIMES = [field for field in keeping.EVERYTHING if field != "mtime"]


def keeps_times(words: str) -> bool:
    """Whether cp keeps times with these options."""
    kept = [word for word in words.split() if word in KEEP_TIMES]
    return bool(kept) and not words.endswith("--no-preserve=timestamps")


@slow
@needs_root
@needs("setfacl", "setfattr")
class LikeCp(TestCase):
    """One source, copied by both; whatever differs is named."""

    def setUp(self) -> None:
        self.source = make_source(self)

    def copies(self, words: str, prepare: str, umask: int) -> Tuple[Looks, Looks]:
        """What cp and what fastcp make, each in a directory of its own that was prepared."""
        found = []
        for tool, run in (("cp", run_cp), ("fastcp", run_fastcp)):
            place = self.make(tool, {})
            shell(prepare, place)
            sources = [f"{self.source}/{word}" for word in words.split() if word[0] != "-"] or [self.source]
            options = [word for word in words.split() if word[0] == "-"]
            if "-L" in options:  # the tree has a dangling link
                sources = [f"{self.source}/{name}" for name in ("plain", "private", "setgid", "link")]
            done = run(*options, *sources, place, umask=umask)
            self.assertEqual(done.returncode, 0, done)
            found.append(without_trusted(looks(place)))
            support.remove_tree(place)
        return found[0], found[1]

    def test_options_and_what_the_destination_passes_on(self) -> None:
        for prepare, umask, options in PLACES:
            for words in options:
                with self.subTest(words=words, prepare=prepare, umask=oct(umask)):
                    cp, fastcp = self.copies(words, prepare, umask)
                    fields = keeping.EVERYTHING if keeps_times(words) else NOT_TIMES
                    cp["."]["mtime"] = fastcp["."]["mtime"]  # that of the prepared directory
                    self.assertEqual(keeping.differences(fastcp, cp, fields), [])

    def test_the_tools_made_something(self) -> None:
        """The comparison compares what it should: every kind of attribute is in the source."""
        found = looks(self.source)
        modes = {entry["mode"] for entry in found.values()}
        self.assertTrue({"0000", "6755", "7777", "1777", "2775", "0555"} <= modes, modes)
        attributes = {name for entry in found.values() for name in (*entry["attributes"], *entry["acls"])}
        wanted = {"user.colour", "security.capability", "trusted.secret", *keeping.ACLS}
        self.assertTrue(wanted <= attributes, attributes)
        self.assertTrue(set(MOMENTS) <= {entry["mtime"] for entry in found.values()})

    def test_directories_that_exist(self) -> None:
        """What is kept they get too, as with cp; else they keep what they have."""
        there = {name: Dir({}, mode=0o7777) for name in ("private", "sticky", "setgid", "defaults", "unwritable")}
        prepare = "chown 4321:1234 source/*; chmod 7777 source/*; setfacl -d -m u:bin:rwx source/private"
        for words in ("-a", "-r -P -p", "-r -P", "-r -P --preserve=ownership", "-r -P --preserve=timestamps"):
            found = []
            for run in (run_cp, run_fastcp):
                place = self.make("place", {"source": {**there, "other": b"stays"}})
                shell(prepare, place)
                done = run(*words.split(), self.source, place)
                self.assertEqual(done.returncode, 0, done)
                found.append(without_trusted(looks(os.path.join(place, "source"))))
                support.remove_tree(place)
            found[0]["other"] = found[1]["other"]
            names = [".", *there] if not keeps_times(words) else list(found[0])
            cp, fastcp = ({name: side[name] for name in names} for side in found)
            with self.subTest(words=words):
                fields = keeping.EVERYTHING if keeps_times(words) else NOT_TIMES
                lines = keeping.differences(fastcp, cp, fields)
                self.assertEqual([line for line in lines if "acls" not in line or words in ("-a", "-r -P -p")], [])

    def test_files_that_are_replaced(self) -> None:
        """The new one gets what is kept of its source, and the rest from the one that it replaces."""
        there = {name: File(b"old", mode=0o647) for name in ("plain", "setid", "readonly", "open", "acl", "direct")}
        prepare = "chown 4321:1234 source/*; setfacl -m u:bin:rwx,g::-w- source/plain source/acl source/open"
        kept = ("-a", "-r -P -p", "-r -P", "-r -P --preserve=timestamps", "-a --no-preserve=ownership")
        for words in kept:
            found = []
            for run in (run_cp, run_fastcp):
                place = self.make("place", {"source": there})
                shell(prepare, place)
                done = run("-f", *words.split(), self.source, place)
                self.assertEqual(done.returncode, 0, done)
                found.append({name: look for name, look in looks(f"{place}/source").items() if name in there})
                support.remove_tree(place)
            fields = ["kind", "content", "mode", "owner", "acls"] + ["mtime"] * keeps_times(words)
            with self.subTest(words=words):
                self.assertEqual(keeping.differences(found[1], found[0], fields), [])

    NAMES: ClassVar[Dict[str, int]] = {"private": 0o600, "setid": 0o4755, "open": 0o644}

    @slow
    @needs("strace")
    def test_files_are_private_until_they_are_dressed(self) -> None:
        """What gets another owner or mode later is made for its owner alone: nobody opens it meanwhile."""
        self.make("s", {name: File(b"1", mode=mode) for name, mode in self.NAMES.items()})
        for options, wanted in (
            (["-r"], {"0644", "0755", "0600"}),
            (["-r", "-p"], {"0600"}),
            (["-a"], {"0600"}),
            (["-r", "--preserve=ownership"], {"0600", "0700"}),
        ):
            with self.subTest(options=options):
                modes = self.modes_at_creation(*options, self.path("s"), self.path("d" + "".join(options)))
                self.assertEqual(len(modes), 1 + len(self.NAMES))
                self.assertEqual(set(modes[1:]), wanted)  # the first asks whether there are nameless files
        modes = self.modes_at_creation("-rfT", self.path("s"), self.path("d-a"))
        self.assertEqual(modes, ["0600"] * (1 + len(self.NAMES)))  # a record of the run, and what replaces

    def modes_at_creation(self, *words: str) -> List[str]:
        """The modes with which a run made its files."""
        log = self.path("log")
        under = ["strace", "-f", "-qq", "-o", log, "-e", "trace=openat"]
        run_tool("fastcp", "-n1", *words, under=under, expect=0)
        with open(log, encoding="utf-8", errors="surrogateescape") as file:
            return [m for line in file for m in re.findall(r"(?:O_TMPFILE|O_EXCL).*, (0\d+)\) = \d", line)]


@needs_root
@needs("setfacl")
class DefaultAcl(TestCase):
    """What is not kept comes from the destination's directory, just as for any program that makes something there."""

    ACLS = ("u:bin:rwx,g::---,o::---", "u::rwx,g::rwx,o::rwx", "u::rwx,g::r-x,o::---,u:daemon:r--,m::r--")
    TREE: ClassVar[Dict[str, Any]] = {
        "f": File(b"1", mode=0o664),
        "g": File(b"2", mode=0o600),
        "d": Dir({"x": File(b"3", mode=0o755)}, mode=0o775),
        "e": Dir({}, mode=0o500),
    }

    def setUp(self) -> None:
        self.make("source", self.TREE)

    def made(self, place: str, default: bool) -> None:
        """The same names by mkdir(2) and open(2)."""
        for name, mode in (("", 0o755), ("d", 0o775), ("e", 0o700)):
            os.mkdir(os.path.join(place, name), 0o777 if default else mode)
        for name, mode in (("f", 0o664), ("g", 0o600), ("d/x", 0o755)):
            os.close(os.open(os.path.join(place, name), os.O_CREAT | os.O_WRONLY, 0o666 if default else mode))

    def test_as_the_kernel_makes_it(self) -> None:
        for number, (acl, options) in enumerate(
            itertools.product(self.ACLS, ("-r", "-r --no-preserve=mode", "-r --preserve=timestamps,xattr"))
        ):
            with self.subTest(acl=acl, options=options):
                place = self.make(f"{number}", {})
                shell(f"setfacl -d -m {acl} .", place)
                done = run_fastcp(*options.split(), self.path("source"), f"{place}/copy", umask=0o027)
                self.assertEqual(done.returncode, 0, done)
                before = os.umask(0o027)
                self.made(f"{place}/made", "no-preserve" in options)
                os.umask(before)
                copy, made = looks(f"{place}/copy"), looks(f"{place}/made")
                if "no-preserve" not in options:
                    made["e"] = copy["e"]  # it lacks what its source lacks
                    self.assertEqual(copy["e"]["mode"][:2], "05")
                self.assertEqual(keeping.differences(copy, made, ("kind", "mode", "owner", "acls")), [])


class Times(TestCase):
    """Nanoseconds, far past and future, of files, links and directories; access times too."""

    def test_both_times_of_everything(self) -> None:
        source = self.make("s", {"f": b"1", "d": {"g": b"2"}, "l": Link("f"), "big": Random(3 * MIB, seed=1)})
        now = time.time_ns()
        for moment in (*MOMENTS, now, now + 10**18):
            names = ("f", "big", "d/g", "d", "l", "")
            times = {name: (moment + 86_400 * 10**9 + n, moment + n) for n, name in enumerate(names)}
            for name, (atime, mtime) in times.items():
                os.utime(os.path.join(source, name), ns=(atime, mtime), follow_symlinks=False)
            before = {name: os.lstat(os.path.join(source, name)).st_atime_ns for name in names}
            with self.subTest(moment=moment):
                copy = self.path(f"c{moment}")
                done = run_fastcp("-a", source, copy)
                self.assertEqual(done.returncode, 0, done)
                for name, (_, mtime) in times.items():
                    st = os.lstat(os.path.join(copy, name))
                    self.assertEqual(st.st_mtime_ns, mtime, name)
                    if name in ("f", "big", "d/g"):
                        self.assertEqual(st.st_atime_ns, before[name], name)

    def test_directories_keep_theirs_whatever_is_put_below(self) -> None:
        tree = {f"d{d}": {f"e{e}": {"f": b"1"} for e in range(5)} for d in range(20)}
        source = self.make("s", tree)
        for directory, _, _ in os.walk(source, topdown=False):
            os.utime(directory, ns=(10**18, 10**18 + len(directory)))
        run_tool("fastcp", "-a", "-n4", source, self.path("c"), expect=0)
        self.assert_same_tree(self.path("c"), source, times=True)
        self.make("c/d3/new", b"")  # a second run sets it right again
        os.unlink(self.path("c", "d3", "e1", "f"))
        run_tool("fastcp", "-auT", "-n4", source, self.path("c"), expect=0)
        os.unlink(self.path("c", "d3", "new"))
        for name in ("d3/e1", "d4", ""):
            self.assertEqual(os.stat(self.path("c", name)).st_mtime_ns, os.stat(f"{source}/{name}").st_mtime_ns)


@needs_root
class Unfinished(TestCase):
    """Directories get what is kept of them also when the run failed or was stopped."""

    TREE: ClassVar[Dict[str, Any]] = {
        "closed": Dir({"f": b"1", "deep": Dir({"g": b"2"}, mode=0o555)}, mode=0o500),
        "owned": Dir({}, mode=0o2750),
        "zlarge": Random(40 * MIB, seed=1),
    }

    def setUp(self) -> None:
        self.source = self.make("source", self.TREE)
        shell("chown 1234:2345 owned; chmod 2750 owned", self.source)
        for name in ("closed/deep", "closed", "owned"):
            os.utime(os.path.join(self.source, name), ns=(10**18, 10**18 + len(name)))

    def assert_finished(self, copy: str, names: Sequence[str] = ("closed", "closed/deep", "owned")) -> None:
        """The directories are as in the source."""
        source, found = looks(self.source), looks(copy)
        expected = {name: source[name] for name in names}
        actual = {name: found[name] for name in names}
        self.assertEqual(keeping.differences(actual, expected, ("mode", "owner", "mtime")), [])

    def test_on_a_full_disk(self) -> None:
        with support.mounted("tmpfs", size=16 * MIB) as place:
            done = run_tool("fastcp", "-a", self.source, f"{place}/c", expect=1)
            self.assertIn("No space left on device", done.stderr)
            self.assert_finished(f"{place}/c")
            self.assertFalse(os.path.exists(f"{place}/c/zlarge"))

    def test_when_a_file_cannot_be_read(self) -> None:
        code = b"import os; open = os.open\ndef fail(name, *a, **k):\n"
        code += b"    if name in ('f', 'zlarge'): raise OSError(5, 'no', name)\n    return open(name, *a, **k)\n"
        self.make("site", {"sitecustomize.py": code + b"os.open = fail\n"})
        for options in (["-a"], ["-a", "-n1"], ["-r", "-n1"]):
            copy = self.path("c" + "".join(options))
            run_tool("fastcp", *options, self.source, copy, env={"PYTHONPATH": self.path("site")}, expect=1)
            if options[0] == "-a":
                self.assert_finished(copy)
            self.assertEqual(os.stat(f"{copy}/closed").st_mode & 0o777, 0o500)

    @slow
    def test_after_a_signal(self) -> None:
        self.make("source/more", {f"f{i}": Random(30 * MIB, seed=i) for i in range(6)})
        for number, signum in enumerate((signal.SIGTERM, signal.SIGINT)):
            copy = self.path(f"c{number}")
            process = self.start_tool("fastcp", "-a", self.source, copy, stderr=subprocess.PIPE)
            deadline = time.monotonic() + 20
            while not os.path.isdir(f"{copy}/closed/deep") and time.monotonic() < deadline:
                time.sleep(0.002)
            process.send_signal(signum)
            said = process.communicate(timeout=30)[1]
            self.assertEqual(process.returncode, -signum, said)
            self.assert_finished(copy)
            self.assert_no_leftovers(copy)

    @slow
    @needs("strace")
    def test_when_every_worker_dies(self) -> None:
        """Each is killed at the first write of a large file: by then the directories have been made."""
        log = self.path("log")
        under = support.strace_inject(log, "pwritev2", "signal=KILL")
        done = run_tool("fastcp", "-a", "-n2", self.source, self.path("c"), under=under, expect=1)
        self.assertIn("SIGKILL", done.stderr)
        self.assert_finished(self.path("c"))


@needs_root
class Unsupported(TestCase):
    """Where attributes or ACLs cannot be had, or fail: bytes are whole, and it is said."""

    def setUp(self) -> None:
        self.make("s", {"f": b"1", "d": {}})
        self.make("x", {"f": b"1", "d": {}})
        shell("setfattr -n user.a -v 1 x/f; setfattr -n user.d -v 1 x/d", self.tmp)
        self.make("acl", {"f": b"1"})
        shell("setfacl -m u:bin:rw acl/f", self.tmp)

    # On ramfs, which knows neither: the source, options, whether it is a success, what is said.
    ROWS: Sequence[Tuple[str, str, bool, str]] = (
        ("s", "-a", True, ""),
        ("s", "-rp", True, ""),
        ("s", "-r --preserve=xattr", True, ""),
        ("x", "-a", True, "warning: cannot preserve the extended attribute user.a: Operation not supported"),
        ("x", "-r --preserve=all", True, "warning: cannot preserve the extended attribute user.d"),
        ("x", "-r", True, ""),
        ("x", "-a --no-preserve=xattr", True, ""),
        ("x", "-r --preserve=xattr", False, "f': cannot preserve the extended attribute user.a: "),
        ("x", "-a --preserve=xattr", False, "finish directory '.*d': cannot preserve the extended attribute user.d"),
        ("acl", "-rp", False, "cannot preserve the ACL of some files"),
        ("acl", "-r", True, ""),
    )

    def test_as_cp(self) -> None:
        with support.mounted_at(self.path("ramfs"), "-t", "ramfs", "ramfs") as place:
            for number, (name, options, success, said) in enumerate(self.ROWS):
                with self.subTest(name=name, options=options):
                    cp = run_cp(*options.split(), self.path(name), f"{place}/cp{number}")
                    fastcp = run_fastcp(*options.split(), self.path(name), f"{place}/{number}")
                    self.assertEqual((cp.returncode == 0, fastcp.returncode == 0), (success, success), (cp, fastcp))
                    self.assertRegex(fastcp.stderr, said or "^fastcp: 1 file, 2 dir|^fastcp: 1 file, 1 dir")
                    self.assertEqual("warning" in fastcp.stderr, "warning" in said or "ACL" in said)
                    if "xattr" not in options or success:
                        self.assert_same_tree(f"{place}/{number}", self.path(name))
            self.assertEqual(os.stat(f"{place}/9/f").st_mode & 0o070, 0)  # the mask's bits are nobody's
            self.assertEqual(os.stat(f"{place}/10/f").st_mode & 0o070, 0o040)  # as the umask leaves it

    # Calls, errors: under -a a warning or nothing, with --preserve=xattr an error or nothing.
    FAULTS = (
        ("fsetxattr", "EOPNOTSUPP", True),
        ("fsetxattr", "524", True),
        ("fgetxattr", "E2BIG", True),
        ("flistxattr", "EACCES", True),
        ("flistxattr", "EOPNOTSUPP", False),
    )
    WAYS = ((["--preserve=links,xattr,timestamps"], 1, "cannot copy"), (["-a"], 0, "warning"))

    @slow
    @needs("strace")
    def test_calls_that_fail(self) -> None:
        os.unlink(self.path("s", "f"))
        self.make("one", b"1")
        os.setxattr(self.path("one"), "user.a", b"1")
        for call, error, noticed in self.FAULTS:
            for options, status, said in self.WAYS:
                with self.subTest(call=call, error=error, options=options):
                    copy = self.path(f"{call}{error}{status}")
                    under = support.strace_inject(self.path("log"), call, f"error={error}:when=1")
                    done = run_tool("fastcp", "-n1", *options, self.path("one"), copy, under=under)
                    self.assertEqual(support.injected(self.path("log")), 1)
                    self.assertEqual(done.returncode, status if noticed else 0, done)
                    self.assertEqual(said in done.stderr, noticed, done)
                    self.assertEqual(os.path.exists(copy), done.returncode == 0)

    @slow
    @needs("strace")
    def test_some_that_fail_do_not_keep_the_others_back(self) -> None:
        self.make("one", b"1")
        for number in range(5):
            os.setxattr(self.path("one"), f"user.{number}", b"%d" % number)
        under = support.strace_inject(self.path("log"), "fsetxattr", "error=EIO:when=3")
        done = run_tool("fastcp", "-n1", "-a", self.path("one"), self.path("two"), under=under, expect=0)
        self.assertEqual(len([n for n in os.listxattr(self.path("two")) if n.startswith("user.")]), 4)
        self.assertEqual(done.stderr.count("warning"), 1)


@needs_nobody
class OrdinaryUser(TestCase):
    """What nobody may keep: as cp, but that the bits of a group that is lost are cleared, and that is said."""

    def setUp(self) -> None:
        self.make("s", {
            "theirs": File(b"1", mode=0o644),
            "setid": File(b"2", mode=0o6755),
            "sticky": Dir({"x": File(b"3", mode=0o664)}, mode=0o1777),
            "shared": Dir({}, mode=0o2775),
            "readonly": Dir({"y": File(b"4", mode=0o444), "z": File(Random(3 * MIB), mode=0o440)}, mode=0o555),
        })
        shell("chown :nogroup s/readonly/z", self.tmp)
        self.make("own", {"setid": File(b"5", mode=0o6755), "d": Dir({}, mode=0o2750), "l": Link("setid")})
        shell("chown -R nobody:nogroup own; chmod 6755 own/setid; chmod 2750 own/d; chmod 755 own", self.tmp)
        os.chmod(self.make("into", {}), 0o777)

    def both(self, words: str, name: str) -> Tuple[Looks, Looks, support.Result]:
        """What cp and fastcp make as nobody; how fastcp ended."""
        found = []
        for tool in ("cp", "fastcp"):
            copy = self.path("into", f"{tool}{words}{os.path.basename(name)}")
            argv = [*words.split(), self.path(name), copy]
            done = run_cp(*argv, user="nobody") if tool == "cp" else run_tool("fastcp", *argv, user="nobody")
            self.assertEqual(done.returncode, 0, done)
            found.append(looks(copy))
        return found[0], found[1], done

    def test_as_cp(self) -> None:
        lists = (f"-rP --preserve={name}" for name in ("mode", "ownership", "timestamps"))
        for words in ("-rP", "-rpP", "-a", *lists):
            for name in ("s", "own"):
                with self.subTest(words=words, name=name):
                    cp, fastcp, done = self.both(words, name)
                    lost = name == "s" and words in ("-rpP", "-a")
                    if lost:
                        for path, entry in cp.items():
                            if entry["kind"] != "link" and os.lstat(self.path(name, path)).st_gid == 0:
                                entry["mode"] = "%04o" % (int(entry["mode"], 8) & ~0o070)
                    fields = ("kind", "content", "mode", "owner", *(["mtime"] if words in TIMES_AS_NOBODY else []))
                    self.assertEqual(keeping.differences(fastcp, cp, fields), [])
                    warning = "warning: the group of files could not be kept; their group bits are cleared"
                    self.assertEqual(done.stderr.count(warning), int(lost), done)
                    self.assertNotIn("ownership of some files", done.stderr)

    def test_the_group_is_kept_where_only_the_owner_cannot_be(self) -> None:
        """The new files' group is another one, by the directory that they are put into; nobody may give them theirs."""
        shell("chown -R root:nogroup s/theirs; chmod 664 s/theirs; chown :bin into; chmod 2777 into", self.tmp)
        cp, fastcp, done = self.both("-p", "s/theirs")
        self.assertEqual(keeping.differences(fastcp, cp, ("mode", "owner", "mtime")), [])
        self.assertEqual(fastcp["."]["mode"], "0664")
        self.assertNotIn("warning", done.stderr)

    def test_directories_that_shut_their_owner_out_are_dressed_last(self) -> None:
        """Nobody reads them as their group, but owns the copies."""
        self.make("shut", Dir({"d": Dir({"e": Dir({"f": b"1"}, mode=0o070)}, mode=0o070)}, mode=0o070))
        shell("chown -R root:nogroup shut; chmod 070 shut shut/d shut/d/e", self.tmp)
        for words in ("-rP", "-rpP"):
            cp, fastcp, _ = self.both(words, "shut")
            self.assertEqual(keeping.differences(fastcp, cp, ("mode", "owner", "content")), [])
            self.assertEqual({fastcp[name]["mode"] for name in (".", "d", "d/e")}, {"0070" if "p" in words else "0050"})

    def test_set_id_bits_survive_only_with_their_owner(self) -> None:
        _, theirs, _ = self.both("-a", "s")
        _, own, _ = self.both("-a", "own")
        self.assertEqual([theirs[name]["mode"] for name in ("setid", "sticky", "shared")], ["0705", "1707", "0705"])
        self.assertEqual([own[name]["mode"] for name in ("setid", "d")], ["6755", "2750"])

    def test_root_that_may_not_is_an_error(self) -> None:
        """Root squash, a container: root's chown fails, the bytes are whole, and one line says it."""
        under = support.strace_inject(self.path("log"), "fchown", "error=EPERM")
        self.make("many", {f"f{n}": b"1" for n in range(5)})
        shell("chown 1234:2345 many/*; chmod 6755 many/f0", self.tmp)
        for options, status in ((["-rp"], 1), (["-r"], 0)):
            copy = self.path("c" + options[0])
            done = run_tool("fastcp", "-n1", *options, self.path("many"), copy, under=under, expect=status)
            self.assertEqual(done.stderr.count("cannot preserve the ownership of some files"), status)
            self.assert_same_tree(copy, self.path("many"))
            self.assertEqual(os.stat(f"{copy}/f0").st_mode & 0o7000, 0)


TIMES_AS_NOBODY = ("-rpP", "-a", "-rP --preserve=timestamps")


class Usage(TestCase):
    """What --preserve and its kin do not take."""

    def test_values(self) -> None:
        self.make("a", b"1")
        for words, message in (
            ("--preserve=nothing", "not one of mode"),
            ("--preserve=", "not one of mode"),
            ("--preserve=mode,", "not one of mode"),
            ("--preserve=mode,context", "not one of mode"),
            ("--no-preserve=times", "not one of mode"),
            ("--no-preserve", "requires an argument"),
            ("--attributes-only", "unrecognized"),
            ("--backup", "unrecognized"),
            ("--delete", "unrecognized"),
        ):
            with self.subTest(words):
                done = run_fastcp(self.path("a"), self.path("b"), words)
                self.assertEqual(done.returncode, 2, done)
                self.assertRegex(done.stderr, message)
                self.assertFalse(os.path.exists(self.path("b")))


if __name__ == "__main__":
    support.main()
