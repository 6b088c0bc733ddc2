# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Symbolic links followed, copied and replaced, and names of one file kept as such: against the real cp."""

# Takes about 10 s
from __future__ import annotations

import os
from typing import Any, List, Sequence, Tuple

import keeping
import support
from keeping import last_line, looks, run_cp, run_fastcp
from support import Link, TestCase

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
FOLLOWED: List[Tuple[str, Sequence[str], str]] = [
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

    def test_a_directory_is_never_put_through_a_link(self) -> None:
        for options in ("-rf", "-rfP", "-af"):
            with self.subTest(options=options):
                self.make(f"t{options}", {"s": {"d": {"f": b"1"}}, "E": {"d": Link("../o")}, "o": {}})
                done = run_fastcp(options, "s/.", "E", cwd=self.path(f"t{options}"))
                self.assertEqual(done.returncode, 1)
                self.assertEqual(os.listdir(self.path(f"t{options}", "o")), [])


if __name__ == "__main__":
    support.main()
