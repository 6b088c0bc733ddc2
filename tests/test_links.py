# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Symbolic links followed, copied and replaced, and names of one file kept as such: against the real cp."""

# Takes about 15 s
from __future__ import annotations

import functools
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

import copying
import keeping
import support
from keeping import last_line, looks, run_cp, run_fastcp
from support import Link, Random, TestCase, needs, needs_root, slow

from mlperf_common.fileio import copyplan, copytasks, facts, listing, transfer

MIB = 1 << 20

MANY = {
    "f": b"x",
    "D": {
        "in": b"y",
        "l": Link("in"),
        "up": Link("../f"),
        "empty": {},
        "sub": {"g": b"z"},
        "dir": Link("sub"),
        "deep": Link("sub/../sub/g"),
    },
    "lf": Link("f"),
    "ld": Link("D"),
    "lld": Link("ld"),
}
DANGLING = {
    "D": {"a": b"1", "n": Link("nowhere"), "abs": Link("/nowhere/at all"), "self": Link("self")},
    "n": Link("o"),
}

# Options, sources, DEST: all of them in a directory that holds MANY and the empty directory E.
FOLLOWED: Sequence[Tuple[str, Sequence[str], str]] = [
    (options, sources, destination)
    for options in (
        *("-P", "-L", "-H", "-rP", "-rL", "-rH", "-rTP"),
        *("-r -H -L", "-r -L -H", "-r -P -L", "-r -L -P", "-a -L"),
    )
    for sources, destination in (
        (["lf"], "new"),
        (["ld"], "new"),
        (["lld"], "new"),
        (["lf"], "E"),
        (["D"], "new"),
        (["lf", "D", "lld", "f"], "E"),
    )
    if not ("T" in options and len(sources) > 1)
] + [
    ("-rP", ["ld/"], "new"),
    ("-rP", ["ld/."], "new"),
    ("-rP", ["ld/.", "f"], "E"),
    ("-rH", ["ld/", "lld"], "E"),
    ("-rP", ["D/../ld/up"], "new"),
    ("-P", ["lf"], "E/"),
    ("-P", ["lf"], "new/"),
    ("-rP", ["lf", "ld", "-t", "E"], ""),
]


KINDS = ("kind", "content", "mode")


class Case(TestCase):
    """cp and fastcp, each in a copy of one tree."""

    def both(self, name: str, tree: Any, cp: str, fastcp: str = "") -> Tuple[support.Result, support.Result]:
        """Run them, with words of its own for fastcp if there are any; the trees are NAME/cp and NAME/fastcp."""
        self.make(name, {"cp": tree, "fastcp": tree})
        return (
            run_cp(*cp.split(), cwd=self.path(name, "cp")),
            run_fastcp(*(fastcp or cp).split(), cwd=self.path(name, "fastcp")),
        )

    def assert_alike(self, name: str, fields: Sequence[str] = KINDS) -> None:
        """Both trees of ``both`` are the same."""
        actual, expected = looks(self.path(name, "fastcp")), looks(self.path(name, "cp"))
        self.assertEqual(keeping.differences(actual, expected, fields), [])


    def carry_out(
        self, source: str, copy: str, wishes: Dict[str, Any], between: Any = None, on_copied: Any = None
    ) -> copying.Said:
        """Copy a tree in this process; `between` is called after the plan, `on_copied` at each file."""
        said = copying.Said()
        if on_copied:
            said.copied = on_copied  # type: ignore[method-assign]
        pool = copying.make_pool(copytasks.FUNCTIONS, copying.IN_PROCESS)
        roots = listing.Roots(pool)
        try:
            plan = copyplan.plan_copy_operations([source], copy, **wishes)
            if between:
                between()
            transfer.copy(plan, pool, roots, facts.Options(copying.TOKEN, wishes.get("force", False)), said)
        finally:
            roots.close()
            pool.close()
        return said


class Following(Case):
    """-P, -L and -H, for operands and below them."""

    def test_as_cp(self) -> None:
        for number, (options, sources, destination) in enumerate(FOLLOWED):
            words = " ".join([options, *sources, destination])
            with self.subTest(words=words):
                cp, fastcp = self.both(f"{number}", {**MANY, "E": {}}, words)
                self.assertEqual(cp.returncode, fastcp.returncode, (cp, fastcp))
                if cp.returncode == 0:
                    self.assert_alike(f"{number}")
                else:
                    self.assertEqual(os.listdir(self.path(f"{number}", "fastcp", "E")), [])

    def test_dangling_links_are_copied_verbatim(self) -> None:
        for number, words in enumerate(("-rP D new", "-P n new", "-rH D new", "-a D n E", "-rP n D E")):
            with self.subTest(words=words):
                cp, fastcp = self.both(f"{number}", {**DANGLING, "E": {}}, words)
                self.assertEqual((cp.returncode, fastcp.returncode), (0, 0), fastcp)
                self.assert_alike(f"{number}")

    def test_dangling_links_that_are_followed_are_refused_by_name(self) -> None:
        self.make("t", {**DANGLING, "E": {}})
        for words in ("-rL D E", "-r D E", "-rH n E", "-rL n E", "n E"):
            with self.subTest(words=words):
                done = run_fastcp(*words.split(), cwd=self.path("t"))
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, "'D/n': dangling symbolic link" if "D" in words else "cannot stat 'n'")
                self.assertEqual(os.listdir(self.path("t", "E")), [])

    def test_what_a_link_says_is_copied_byte_for_byte(self) -> None:
        texts = [b"x" * 4095, b"a\nb", b"\xff\xfe", b"..//.//x/", b" ", b"-r"]
        self.make("s", {f"l{n}": Link(text) for n, text in enumerate(texts)})
        done = run_fastcp("-rP", self.path("s"), self.path("d"))
        self.assertEqual(done.returncode, 0, done)
        found = [os.readlink(os.fsencode(self.path("d", f"l{n}"))) for n in range(len(texts))]
        self.assertEqual(found, texts)

    def test_many_links_are_counted_and_made_by_several_workers(self) -> None:
        tree = {f"d{d}": {f"{'l' * 200}{n}": Link("../" * 20 + "t") for n in range(50)} for d in range(8)}
        self.make("s", tree)
        done = support.run_tool("fastcp", "-rP", "-n4", self.path("s"), self.path("d"), expect=0)
        self.assert_same_tree(self.path("d"), tree)
        self.assertRegex(done.stderr, "0 files, 400 links, 9 directories")


class Leaving(Case):
    """Links that lead out of what is copied are counted: elsewhere they may lead nowhere, or somewhere else."""

    def test_only_those_are_counted(self) -> None:
        inside: List[str] = ["a", "./a", "d/../a", "d", "d/e/../..", "."]
        outside: List[str] = ["/etc/passwd", "..", "../s/a", "d/../../s", "d/e/../../../x", "/"]
        for number, texts in enumerate((inside, outside, inside + outside)):
            tree: Any = {"a": b"", "d": {"e": {"up": Link("../../a")}}}
            tree.update({f"l{n}": Link(text) for n, text in enumerate(texts)})
            with self.subTest(texts=texts):
                self.make(f"s{number}", tree)
                done = run_fastcp("-rP", self.path(f"s{number}"), self.path(f"d{number}"))
                count = sum(text in outside for text in texts)
                said = last_line(done).partition("links that lead out of the tree: ")[2]
                self.assertEqual(said, f"{count}" if count else "")

    def test_below_the_top_as_many_steps_up_are_inside(self) -> None:
        self.make("s", {"d": {"e": {"in": Link("../../a"), "out": Link("../../../a")}}, "a": b""})
        done = run_fastcp("-rP", self.path("s"), self.path("d"))
        self.assertRegex(done.stderr, "links that lead out of the tree: 1$")

    def test_an_operand_that_is_a_link_leads_out_if_it_leads_up(self) -> None:
        self.make("s", {"up": Link("../x"), "beside": Link("up"), "root": Link("/"), "E": {}})
        done = run_fastcp("-P", "up", "beside", "root", "E", cwd=self.path("s"))
        self.assertRegex(done.stderr, "links that lead out of the tree: 2$")

    def test_none_are_counted_where_all_are_followed(self) -> None:
        self.make("s", {"s": {"out": Link("../x")}, "x": b"1"})
        self.assertNotIn("lead out", run_fastcp("-r", "s", "new", cwd=self.path("s")).stderr)


# What stands at the name of a link, the words, and what the copy says; None: as cp, which is run with -f too.
L = Link("target")
REPLACED: List[Tuple[Any, str, Any]] = [
    (b"old", "-P l E", "cannot create symbolic link 'E/l': File exists"),
    (Link("other"), "-P l E", "cannot create symbolic link 'E/l': File exists"),
    (L, "-P l E", "cannot create symbolic link 'E/l': File exists"),
    (b"old", "-rP s/. E", "cannot create symbolic link 'E/l': File exists"),
    (Link("/nowhere"), "-rP s/. E", "cannot create symbolic link 'E/l': File exists"),
    (b"old", "-fP l E", None),
    (Link("other"), "-fP l E", None),
    (Link("/nowhere"), "-fP l E", None),
    (L, "-fP l E", None),
    (b"old", "-rfP s/. E", None),
    (Link("other"), "-rfP s/. E", None),
    (L, "-rfP s/. E", None),
    ({"x": b"1"}, "-fP l E", "cannot overwrite directory 'E/l' with non-directory"),
    ({"x": b"1"}, "-rfP s/. E", "cannot overwrite directory 'E/l' with non-directory"),
    (support.Fifo(), "-fP l E", "cannot overwrite 'E/l': not a regular file"),
    (support.Fifo(), "-rfP s/. E", "cannot overwrite 'E/l': not a regular file"),
]


class Replacing(Case):
    """Links where something stands."""

    def test_by_a_link(self) -> None:
        for number, (standing, words, message) in enumerate(REPLACED):
            with self.subTest(standing=standing, words=words):
                tree = {"l": L, "s": {"l": L}, "E": {"l": standing, "other": b"o"}}
                cp, fastcp = self.both(f"{number}", tree, words)
                if message is None:
                    self.assertEqual((cp.returncode, fastcp.returncode), (0, 0), fastcp)
                    self.assert_alike(f"{number}")
                else:
                    self.assertEqual(fastcp.returncode, 1)
                    self.assertIn(message, fastcp.stderr)
                    self.assert_same_tree(self.path(f"{number}", "fastcp"), tree)
                self.assert_no_leftovers(self.tmp)

    def test_a_link_by_a_file_leaves_what_it_led_to(self) -> None:
        for number, words in enumerate(("-f a E", "-rf s/. E", "-fP a E", "-af s/. E")):
            with self.subTest(words=words):
                self.make(f"{number}", {"a": b"new", "s": {"a": b"new"}, "E": {"a": Link("o"), "o": b"old"}})
                done = run_fastcp(*words.split(), cwd=self.path(f"{number}"))
                self.assertEqual(done.returncode, 0, done)
                self.assert_same_tree(self.path(f"{number}", "E"), {"a": b"new", "o": b"old"})

    def test_a_link_onto_what_it_leads_to_is_refused(self) -> None:
        trees: List[Tuple[Any, str, str]] = [
            ({"f": b"x", "l": Link("f")}, "-fP l f", "'l' and 'f' are the same file"),
            ({"f": b"x", "l": Link("f"), "E": {}}, "-fP l ./l", "'l' and './l' are the same file"),
            ({"s": {"l": Link("../E/l")}, "E": {"l": b"x"}}, "-rfP s/. E", "'s/./l' and 'E/l' are the same file"),
            ({"s": {"l": Link("../E/l")}, "E": {"l": b"x"}}, "-fP s/l E", "'s/l' and 'E/l' are the same file"),
        ]
        for number, (tree, words, message) in enumerate(trees):
            with self.subTest(words=words):
                self.make(f"{number}", tree)
                done = run_fastcp(*words.split(), cwd=self.path(f"{number}"))
                self.assertEqual(done.returncode, 1)
                self.assertIn(message, done.stderr)
                self.assert_same_tree(self.path(f"{number}"), tree)

    def test_another_name_of_what_a_link_leads_to_is_the_same_file(self) -> None:
        self.make("t", {"f": b"x", "l": Link("f"), "E": {}})
        os.link(self.path("t", "f"), self.path("t", "E", "l"))
        for done in (run_cp("-fP", "l", "E", cwd=self.path("t")), run_fastcp("-fP", "l", "E", cwd=self.path("t"))):
            self.assertEqual(done.returncode, 1)
            self.assertIn("'l' and 'E/l' are the same file", done.stderr)

    def test_a_name_that_appears_meanwhile_wins_unless_forced(self) -> None:
        source = self.make("s", {"l": L})
        for force, standing in ((False, b"old"), (True, b"old"), (False, L), (True, Link("other"))):
            with self.subTest(force=force, standing=standing):
                copy = self.make(f"c{force}{standing!r}", {})
                wishes = {"follow": "none", "force": force}
                appear = functools.partial(support.make_tree, os.path.join(copy, "l"), standing)
                said = self.carry_out(f"{source}/.", copy, wishes, between=appear)
                self.assert_same_tree(copy, {"l": L if force else standing})
                self.assertEqual([reason for _, reason in said.failures], [] if force else ["File exists"])

    def test_update_goes_by_what_links_say_and_by_their_age(self) -> None:
        """The same is left and counted; an older one is replaced; a newer one is somebody's work."""
        for form in ("-rTP s E", "-P s/l E"):
            for label, text, age, options, expected, said in (
                ("same", "target", -9, "-u", "target", "1 skipped, unverified"),
                ("older", "other", -9, "-u", "target", "1 link, "),
                ("equal", "other", 0, "-u", None, "is not older than its source and leads elsewhere"),
                ("newer", "other", 9, "-u", None, "is not older than its source and leads elsewhere"),
                ("forced", "other", 9, "-uf", "target", "1 link, "),
                ("a file", None, -9, "-u", None, "cannot create symbolic link 'E/l': File exists"),
                ("a file, forced", None, -9, "-uf", "target", "1 link, "),
            ):
                with self.subTest(label, form=form):
                    place = self.make(f"{label}{form[:2]}", {"s": {"l": L}, "E": {"l": Link(text) if text else b"f"}})
                    os.utime(f"{place}/s/l", (10**9, 10**9), follow_symlinks=False)
                    os.utime(f"{place}/E/l", (10**9 + age, 10**9 + age), follow_symlinks=False)
                    done = run_fastcp(options, *form.split(), cwd=place)
                    self.assertRegex(done.stderr, said)
                    self.assertEqual(done.returncode, 0 if expected else 1)
                    kept = Link(text) if text else b"f"
                    self.assert_same_tree(f"{place}/E", {"l": Link(expected) if expected else kept})

    def test_a_directory_is_never_put_through_a_link(self) -> None:
        for options in ("-rf", "-rfP", "-af"):
            with self.subTest(options=options):
                self.make(f"t{options}", {"s": {"d": {"f": b"1"}}, "E": {"d": Link("../o")}, "o": {}})
                done = run_fastcp(options, "s/.", "E", cwd=self.path(f"t{options}"))
                self.assertEqual(done.returncode, 1)
                self.assertEqual(os.listdir(self.path(f"t{options}", "o")), [])


# A source `s` in which files and links have several names; words; both tools run in the same directory.
NAMES = """
mkdir -p s/d/deep s/e E
echo a >s/a; ln s/a s/d/b; ln s/a s/d/deep/c; ln s/a s/e/d
: >s/empty; ln s/empty s/d/empty
echo one >s/one; ln s/one outside; echo single >s/single; ln -s single s/lsingle
ln -s $PWD/s/a s/l; ln s/l s/e/l2; ln s/l s/d/l3
ln -s one s/lone; ln -s d s/ld; ln -s ../a s/e/la
ln s/a x; ln s/a y
"""
KEPT = [
    "-a s new",
    "-r -P --preserve=links s new",
    "-r -L --preserve=links s new",
    "-r -H --preserve=links s/ld new",
    "-a -L s new",
    "-a --no-preserve=links s new",
    "-r -P s new",
    "-p -r -P s new",
    "-a s/a s/d/b s/e/d E",
    "-a x y s/d E",
    "-a s/d x E",
    "-a s/. x y E",
    "-a s/l s/e/l2 E",
    "-L --preserve=links s/l x s/lone s/one E",
    "-a s/one outside E",
    "-a s/one E",
    "-a --preserve=links s/d s/e E",
]


@slow
class HardLinks(Case):
    """--preserve=links: names of one file are names of one file again."""

    def test_a_copy_that_splits_them_says_so(self) -> None:
        self.make("s", {"a": b"a", "d": {}, "single": b"s", "l": Link("a")})
        os.link(self.path("s/a"), self.path("s/d/b"))
        os.link(self.path("s/single"), self.path("elsewhere"))
        says = "hard links copied as files of their own: "
        for words, count in (
            ("-r s new", "4"),  # the link is a, too
            ("-rP s new", "3"),
            ("s/a s/single s/d/b E", "3"),
            ("-ru s/. old", "1"),
            ("-a s new", ""),
            ("-r --preserve=links s new", ""),
        ):
            with self.subTest(words=words):
                for name in ("new", "E", "old"):
                    support.remove_tree(self.path(name))
                self.make("E", {})
                self.make("old", {"a": b"a", "d": {"b": b"b"}, "l": b"a"})
                done = run_fastcp(*words.split(), cwd=self.tmp)
                self.assertEqual(done.returncode, 0, done)
                self.assertEqual(last_line(done).partition(says)[2], count)

    def copy(self, *words: str, expect: int = 0) -> support.Result:
        return support.run_tool("fastcp", *words, cwd=self.tmp, expect=expect)

    def inodes(self, *names: str) -> int:
        """How many files have these names."""
        return len({os.lstat(self.path(*name.split("/"))).st_ino for name in names})

    def test_as_cp(self) -> None:
        keeping.shell(NAMES, self.tmp)
        for number, words in enumerate(KEPT):
            with self.subTest(words=words):
                expected = self.outcome(run_cp, words)
                actual = self.outcome(run_fastcp, f"-n{number % 2 * 2 + 1} {words}")
                self.assertEqual(keeping.differences(actual, expected, ("kind", "content", "names")), [])

    def outcome(self, run: Any, words: str) -> keeping.Looks:
        """What a tool makes of the words, gone again afterwards."""
        try:
            done = run(*words.split(), cwd=self.tmp)
            self.assertEqual(done.returncode, 0, done)
            return looks(self.path(words.rsplit(maxsplit=1)[-1]))
        finally:
            keeping.shell("rm -rf new E; mkdir E", self.tmp)

    def test_bytes_move_once(self) -> None:
        self.make("s", {"a": Random(70 * MIB, seed=1), "b": Random(3 * MIB, seed=2), "c": b"small", "d": {}})
        for name in "abc":
            for number in range(3):
                os.link(self.path("s", name), self.path("s", "d", f"{name}{number}"))
        said = self.copy("-a", "s", "c").stderr
        self.assertRegex(said, "12 files, 2 directories, 73.0 MiB")
        for name in "abc":
            self.assertEqual(self.inodes(f"c/{name}", *(f"c/d/{name}{number}" for number in range(3))), 1)
        self.assertEqual(os.stat(self.path("c", "a")).st_nlink, 4)
        self.assert_same_tree(self.path("c"), self.path("s"))

    def test_a_new_name_is_one_over_what_exists(self) -> None:
        """Apart, linked to each other, to something else, or to the right file already."""
        self.make("s", {"a": b"new", "d": {}})
        os.link(self.path("s", "a"), self.path("s", "d", "b"))
        scripts = {
            "apart": "echo old >c/a; echo old >c/d/b",
            "one": "echo old >c/a; ln c/a c/d/b",
            "crossed": "echo old >c/a; echo other >c/d/b; ln c/a c/x; ln c/d/b c/y",
            "links": "ln -s x c/a; ln -s ../y c/d/b; echo old >c/x; echo old >c/y",
            "the second alone": "echo old >c/d/b",
        }
        for label, script in scripts.items():
            with self.subTest(label):
                keeping.shell(f"rm -rf c; mkdir -p c/d; {script}", self.tmp)
                others = {name: look["content"] for name, look in looks(self.path("c")).items() if name in "xy"}
                self.assertIn("File exists", self.copy("-aT", "s", "c", expect=1).stderr)
                self.copy("-afT", "s", "c")
                self.assertEqual(self.inodes("c/a", "c/d/b"), 1)
                self.assertEqual(os.stat(self.path("c", "a")).st_nlink, 2)
                found = looks(self.path("c"))
                self.assertEqual([found[name]["content"] for name in ("a", "d/b")], [b"new", b"new"])
                self.assertEqual({name: found[name]["content"] for name in others}, others)
                self.assert_no_leftovers(self.tmp)

    def test_names_follow_their_file_when_it_fails(self) -> None:
        self.make("s", {"a": Random(3 * MIB, seed=1), "d": {}, "other": b"o"})
        os.link(self.path("s", "a"), self.path("s", "d", "b"))
        os.link(self.path("s", "a"), self.path("s", "d", "c"))
        with support.mounted("tmpfs", size=2 * MIB) as place:
            done = self.copy("-a", "s", f"{place}/c", expect=1)
            self.assertIn("No space left on device", done.stderr)
            self.assertFalse(os.path.exists(f"{place}/c/d/b"))
        code = "import os; open = os.open\ndef fail(name, *a, **k):\n"
        code += "    if name == 'a': raise OSError(5, 'Input/output error', name)\n    return open(name, *a, **k)\n"
        self.make("site", {"sitecustomize.py": (code + "os.open = fail\n").encode()})
        done = support.run_tool(
            "fastcp", "-a", "s", "c", cwd=self.tmp, expect=1, env={"PYTHONPATH": self.path("site")}
        )
        self.assert_same_tree(self.path("c"), {"d": {}, "other": b"o"})
        self.assertRegex(done.stderr, "cannot copy 's/a' to 'c/a': .*Input/output error")
        for name in ("b", "c"):
            self.assertIn(
                f"cannot copy 's/d/{name}' to 'c/d/{name}': another name of the same file, 's/a', was not copied",
                done.stderr,
            )
        self.assertIn("FAILED: 3 of 4 files not copied", done.stderr)

    def test_what_is_there_already_gets_the_missing_names(self) -> None:
        keeping.shell("mkdir -p s/d; echo a >s/a; ln s/a s/d/b; ln s/a s/d/c", self.tmp)
        self.copy("-a", "s", "c")
        os.unlink(self.path("c", "d", "b"))
        inode = os.stat(self.path("c", "a")).st_ino
        said = self.copy("-auT", "s", "c").stderr
        self.assertRegex(said, "1 file, 0 directories, 0 B .*; 2 skipped, unverified")
        self.assertEqual(os.stat(self.path("c", "d", "b")).st_ino, inode)

    def test_a_further_name_that_is_right_is_left(self) -> None:
        """rename(2) of one name of a file over another does nothing: the temporary would stay."""
        keeping.shell("mkdir -p s/d; echo a >s/a; ln s/a s/d/b", self.tmp)
        self.copy("-a", "s", "c")
        said = self.copy("-auT", "--checksum", "s", "c").stderr
        self.assertEqual(os.stat(self.path("c", "a")).st_nlink, 2)
        self.assertIn("1 skipped, compared and the same", said)
        self.assert_no_leftovers(self.tmp)

    def test_a_file_that_is_not_ours_gets_no_further_names(self) -> None:
        """Between the copy and its further names somebody removes the copy, or puts another in its place."""
        for label, size in (("removed", None), ("another", 7)):
            with self.subTest(label):
                source = self.make(f"s{label}", {"a": b"abc", "d": {}})
                os.link(os.path.join(source, "a"), os.path.join(source, "d", "b"))
                copy = self.path(label)

                def meddle(_: str, destination: str, size: Optional[int] = size) -> None:
                    os.unlink(destination)
                    if size:
                        support.make_tree(destination, b"x" * size)

                said = self.carry_out(source, copy, {"keep_links": True}, on_copied=meddle)
                self.assertEqual(os.listdir(os.path.join(copy, "d")), [])
                self.assertIn(os.path.join(source, "d", "b"), [name for name, _ in said.failures])

    def test_the_plan_counts_the_bytes_once(self) -> None:
        keeping.shell("mkdir -p s/d; echo abc >s/a; ln s/a s/d/b", self.tmp)
        for kept, size in ((False, 8), (True, 4)):
            plan = copyplan.plan_copy_operations([self.path("s")], self.path("c"), keep_links=kept)
            self.assertEqual(plan.size(), size)

    @slow
    @needs("strace")
    def test_where_no_more_names_are_allowed_it_is_copied(self) -> None:
        """The leader's own name, the first call, may be had; of the next calls some may not."""
        self.make("s", {"a": b"1", "d": {}, "l": Link("a")})
        for number in range(4):
            os.link(self.path("s", "a"), self.path("s", "d", f"b{number}"))
        log = self.path("log")
        for error in ("EMLINK", "EPERM", "EOPNOTSUPP"):
            with self.subTest(error):
                under = support.strace_inject(log, "linkat", f"error={error}:when=3..4")
                words = ("-n1", "-a", "s", error)
                done = support.run_tool("fastcp", *words, cwd=self.tmp, under=under, expect=0)
                self.assertEqual(support.injected(log), 2)
                self.assert_same_tree(self.path(error), self.path("s"))
                self.assertEqual(self.inodes(f"{error}/a", *(f"{error}/d/b{n}" for n in range(4))), 3)
                self.assertRegex(done.stderr, "warning: 2 names copied as files of their own")
                self.assertRegex(done.stderr, "5 files, 1 link, 2 directories, 3 B")

    @slow
    @needs("strace")
    def test_links_that_may_have_one_name_only_are_copied_as_links(self) -> None:
        keeping.shell("mkdir -p s/d E; ln -s nowhere s/l; ln s/l s/d/l2; ln -s x m; ln m n", self.tmp)
        log = self.path("log")
        for words in (["-a", "s", "c"], ["-a", "m", "n", "E"], ["-aTf", "s", "c"]):
            with self.subTest(words=words):
                under = support.strace_inject(log, "linkat", "error=EPERM")
                done = support.run_tool("fastcp", "-n1", *words, cwd=self.tmp, under=under, expect=0)
                self.assertEqual(support.injected(log), 2 if "-aTf" in words else 1)  # -f: a record, too
                self.assertRegex(done.stderr, "warning: 1 name copied as files of their own")
        self.assert_same_tree(self.path("c"), {"l": Link("nowhere"), "d": {"l2": Link("nowhere")}})
        self.assert_same_tree(self.path("E"), {"m": Link("x"), "n": Link("x")})

    @slow
    @needs_root
    def test_more_names_than_ext4_allows(self) -> None:
        count = 65_010
        with support.mounted("tmpfs", size=64 * MIB) as source, support.mounted("ext4", size=256 * MIB) as place:
            os.mkdir(f"{source}/s")
            support.make_tree(f"{source}/s/{0:05}", b"x")
            for number in range(1, count):
                os.link(f"{source}/s/{0:05}", f"{source}/s/{number:05}")
            done = support.run_tool("fastcp", "-a", f"{source}/s", f"{place}/c", expect=0)
            self.assertRegex(done.stderr, "warning: 10 names copied as files of their own")
            names = os.listdir(f"{place}/c")
            self.assertEqual(len(names), count)
            self.assertEqual(os.stat(f"{place}/c/{0:05}").st_nlink, 65_000)
            self.assertEqual(len({os.stat(f"{place}/c/{name}").st_ino for name in names}), 11)


if __name__ == "__main__":
    support.main()
