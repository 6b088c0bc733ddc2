# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The scripts in client/: which package they run, however they are called, and what they say without one.

Which package is found is tested on copies of the scripts with a package made here that tells its name; what
works at all, on the real one, in place and from `pip install`.
"""

# Takes about 20 s
from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import unittest
from typing import Any, Dict, Optional, Sequence, Set

import support
from support import TOOLS, Link, make_tree

# Modules of the library that the tools import sooner or later: no file of that name may come instead.
LIBRARY_NAMES = (
    "argparse",
    "signal",
    "queue",
    "hashlib",
    "multiprocessing",
    "shutil",
    "socket",
    "struct",
    "direct_io",
)
STALE = {f"{name}.py": b"raise SystemExit('stale ' + __name__)\n" for name in LIBRARY_NAMES}
OLD_PYTHONS = ("2.7", "3.6", "3.7")
VERSION = re.compile(rb'^__version__ = "(.*)"$', re.MULTILINE)


def package(label: str, body: str = "return 0") -> Dict[str, Any]:
    """A tree with a package mlperf_common whose command lines print LABEL and their arguments."""
    main = (
        "import argparse, errno, hashlib, multiprocessing, queue, shutil, signal, stat, sys\n"
        f"def main(argv=None):\n    print({label!r}, *sys.argv[1:], flush=True)\n    {body}\n"
    ).encode()
    return {
        "mlperf_common": {
            "__init__.py": b"",
            "fileio": {"__init__.py": b"", **{f"{tool}.py": main for tool in TOOLS}},
        }
    }


def scripts(**more: Any) -> Dict[str, Any]:
    """A directory with copies of the three scripts, and more."""
    tree: Dict[str, Any] = dict(more)
    for tool in TOOLS:
        with open(os.path.join(support.CLIENT, tool), "rb") as stream:
            tree[tool] = support.File(stream.read(), mode=0o755)
    return tree


class Case(support.TestCase):
    def call(
        self,
        script: str,
        *args: str,
        env: Optional[Dict[str, Optional[str]]] = None,
        flags: Sequence[str] = (),
        **options: Any,
    ) -> support.Result:
        """Run a script by the interpreter that runs the tests, without a PYTHONPATH of the caller's."""
        argv = [sys.executable, *flags, script, *args]
        return support.run(argv, env={"PYTHONPATH": None, **(env or {})}, **options)

    def assert_says(self, result: support.Result, line: str) -> None:
        """Succeeded, with this one line on stdout."""
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, line + "\n", ""), result)

    def assert_refuses(self, result: support.Result, pattern: str) -> None:
        """Exit status 1, nothing on stdout, one line on stderr that has the pattern."""
        self.assertEqual((result.returncode, result.stdout), (1, ""), result)
        self.assertRegex(result.stderr, rf"\A[^\n]*{pattern}[^\n]*\n\Z")


class WhichPackage(Case):
    def test_the_tree_of_the_script_from_anywhere(self) -> None:
        self.make("tree", {**package("tree"), "client": scripts()})
        for tool in TOOLS:
            for cwd, script in (
                ("/", self.path("tree/client", tool)),
                (self.path("tree"), f"client/{tool}"),
                (self.path("tree/client"), tool),
                (self.path("tree/mlperf_common"), f"../client/{tool}"),
            ):
                with self.subTest(tool, cwd=cwd):
                    self.assert_says(self.call(script, "-r", cwd=cwd), "tree -r")

    def test_by_its_own_first_line(self) -> None:
        self.make("tree", {**package("tree"), "client": scripts()})
        wrapper = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'.encode()
        self.make("bin", {"python3": support.File(wrapper, mode=0o755)})
        path = os.pathsep.join([self.path("bin"), self.path("tree/client"), os.defpath])
        for tool in TOOLS:
            with self.subTest(tool):
                self.assert_says(support.run(["sh", "-c", f"{tool} x"], env={"PATH": path}, cwd="/"), "tree x")

    def test_through_links(self) -> None:
        self.make("tree", {**package("tree"), "client": scripts()})
        # What lies around the links is another package and other modules: none of it may be used.
        self.make(
            "home",
            {
                "bin": {
                    **STALE,
                    "fastcp": Link("../links/second"),
                    "fcp": Link("fastcp"),
                    "direct": Link(self.path("tree/client/fastcp")),
                },
                "links": {**STALE, "second": Link("../../tree/client/fastcp")},
                "tools": Link("../tree/client"),
                **package("wrong"),
            },
        )
        for name in ("bin/fastcp", "bin/fcp", "bin/direct", "tools/fastcp"):
            for cwd in ("/", self.path("home/bin")):
                with self.subTest(name, cwd=cwd):
                    self.assert_says(self.call(os.path.relpath(self.path("home", name), cwd), cwd=cwd), "tree")

    def test_the_tree_comes_before_an_installed_package_which_comes_without_a_tree(self) -> None:
        self.make("installed", package("installed"))
        self.make("tree", {**package("tree"), "client": scripts()})
        self.make("bin", scripts())
        env = {"PYTHONPATH": self.path("installed")}
        for tool in TOOLS:
            with self.subTest(tool):
                self.assert_says(self.call(self.path("tree/client", tool), env=env), "tree")
                self.assert_says(self.call(self.path("bin", tool), env=env), "installed")

    def test_files_named_like_the_library(self) -> None:
        self.make("tree", {**package("tree"), **STALE, "client": scripts(**STALE)})
        self.make("here", {**package("wrong"), **STALE})
        for tool in TOOLS:
            for cwd in (self.path("here"), self.path("tree/client"), self.path("tree")):
                with self.subTest(tool, cwd=cwd):
                    self.assert_says(self.call(self.path("tree/client", tool), cwd=cwd), "tree")

    def test_files_named_like_the_library_where_pythonpath_has_the_working_directory(self) -> None:
        self.make("tree", {**package("tree"), "client": scripts()})
        here = self.make("here", {**package("wrong"), **STALE})
        # -S: an installed .pth file may import half the library before any script has a say.
        result = self.call(self.path("tree/client/fastcp"), env={"PYTHONPATH": here}, cwd=here, flags=["-S"])
        self.assert_says(result, "tree")

    def test_files_named_like_the_library_beside_an_installed_script(self) -> None:
        self.make("bin", scripts(**STALE))
        self.make("installed", package("installed"))
        env: Dict[str, Optional[str]] = {"PYTHONPATH": self.path("installed")}
        for tool in TOOLS:
            for cwd in ("/", self.path("bin")):
                with self.subTest(tool, cwd=cwd):
                    self.assert_says(self.call(self.path("bin", tool), env=env, cwd=cwd), "installed")

    def test_called_from_where_the_package_is_installed(self) -> None:
        self.make("bin", scripts())
        self.make("installed", package("installed"))
        result = self.call(
            self.path("bin/fastcp"), env={"PYTHONPATH": self.path("installed")}, cwd=self.path("installed")
        )
        self.assert_says(result, "installed")

    def test_the_working_directory_is_gone(self) -> None:
        self.make("tree", {**package("tree"), "client": scripts()})
        os.mkdir(self.path("gone"))
        argv = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, self.path("tree/client/fastcp")]
        # A relative PYTHONPATH would stop the interpreter itself.
        self.assert_says(support.run(argv, cwd=self.path("gone"), env={"PYTHONPATH": None}), "tree")

    def test_interpreter_options_that_leave_out_the_script_directory(self) -> None:
        self.make("tree", {**package("tree"), "client": scripts(**STALE)})
        flags = ["-I", "-O", "-OO", "-s", "-Werror"] + (["-P"] if sys.version_info >= (3, 11) else [])
        for flag in flags:
            with self.subTest(flag):
                self.assert_says(self.call(self.path("tree/client/fastcp"), flags=[flag]), "tree")

    def test_the_status_is_that_of_main(self) -> None:
        self.make("tree", {**package("tree", "return 7"), "client": scripts()})
        for tool in TOOLS:
            with self.subTest(tool):
                self.assertEqual(self.call(self.path("tree/client", tool)).returncode, 7)


class NoPackage(Case):
    def test_nowhere_is_one_line(self) -> None:
        self.make("client", scripts())
        for tool in TOOLS:
            for args in ([], ["--help"], ["-r", "a", "b"]):
                with self.subTest(tool, args=args):
                    result = self.call(self.path("client", tool), *args, cwd="/")
                    self.assert_refuses(result, f"^{tool}: cannot find the package mlperf_common")

    def test_damaged_is_not_nowhere(self) -> None:
        damages = {
            "a module missing": {"fastcp.py": b"import no_such_module\n"},
            "a name missing": {"fastcp.py": b"from mlperf_common import no_such_name\n"},
            "a part missing": {"fastcp.py": b"import mlperf_common.no_such_part\n"},
            "half a file": {"fastcp.py": b"def main(:\n"},
            "zeros after a crash": {"fastcp.py": b"\0" * 4096},
            "no main": {"fastcp.py": b""},
            "no such tool": {"other.py": b""},
            "an exception": {"fastcp.py": b"1 / 0\n"},
        }
        self.make("installed", package("installed"))
        for what, files in damages.items():
            tree = self.make(
                what,
                {
                    "client": scripts(),
                    "mlperf_common": {"__init__.py": b"", "fileio": {"__init__.py": b"", **files}},
                },
            )
            for pythonpath in (None, self.path("installed")):
                with self.subTest(what, pythonpath=pythonpath):
                    result = self.call(os.path.join(tree, "client", "fastcp"), env={"PYTHONPATH": pythonpath})
                    self.assert_refuses(result, "^fastcp: cannot import the package mlperf_common: .*Error")

    def test_the_package_itself_damaged(self) -> None:
        for what, source in (("syntax", b"("), ("import", b"import no_such_module\n")):
            with self.subTest(what):
                tree = self.make(what, {"client": scripts(), "mlperf_common": {"__init__.py": source}})
                self.assert_refuses(self.call(os.path.join(tree, "client", "fastcp")), "cannot import the package")

    def test_the_whole_story_on_request(self) -> None:
        tree = self.make("tree", {"client": scripts(), "mlperf_common": {"__init__.py": b"1 / 0\n"}})
        result = self.call(os.path.join(tree, "client", "fastcp"), env={"FASTCP_DEBUG": "1"}, stderr=subprocess.STDOUT)
        self.assertIn("Traceback (most recent call last)", result.stdout)
        self.assertEqual(result.returncode, 1)


class OldPython(Case):
    def test_one_line(self) -> None:
        for version in OLD_PYTHONS:
            python = support.old_python(version)
            for tool in TOOLS:
                with self.subTest(tool, version=version):
                    result = support.run([python, os.path.join(support.CLIENT, tool), "-r", "a", "b"], cwd=self.tmp)
                    self.assert_refuses(result, rf"^{tool}: needs Python 3\.8 or later, this is {re.escape(version)}\.")


class Interrupt(Case):
    def start_slowly(self, *prefix: str) -> subprocess.Popen[bytes]:
        """A tool that is still importing when this returns."""
        slow = b"import time; print('importing', flush=True); time.sleep(60)\n"
        tree = self.make("tree", {"client": scripts(), "mlperf_common": {"__init__.py": slow}})
        process = support.start(
            [*prefix, sys.executable, os.path.join(tree, "client", "fastcp")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(self._end, process)
        self.assertEqual(process.stdout.readline(), b"importing\n")
        return process

    def test_while_it_starts_it_ends_by_the_signal_and_in_silence(self) -> None:
        process = self.start_slowly()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, err), (-signal.SIGINT, b""))

    def test_ignored_it_stays_ignored(self) -> None:
        process = self.start_slowly("sh", "-c", 'trap "" INT; exec "$@"', "sh")
        process.send_signal(signal.SIGINT)
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(0.3)


class Files(Case):
    def test_the_scripts_differ_in_their_names_alone(self) -> None:
        texts = []
        for tool in TOOLS:
            with open(os.path.join(support.CLIENT, tool), encoding="ascii") as stream:
                text = stream.read()
            first, rest = re.fullmatch(r'(?s)(.*?""").*?: (find the package.*)', text).groups()
            texts.append(first + rest.replace(tool, "TOOL"))
        self.assertEqual(len(set(texts)), 1)

    def test_they_can_be_executed(self) -> None:
        for tool in TOOLS:
            with self.subTest(tool):
                self.assertEqual(os.stat(os.path.join(support.CLIENT, tool)).st_mode & 0o111, 0o111)
                with open(os.path.join(support.CLIENT, tool), "rb") as stream:
                    self.assertEqual(stream.readline(), b"#!/usr/bin/env python3\n")


class Jobs(Case):
    """What each way of calling must be able to do, on the real package."""

    def check_tools(self, directory: str, python: Sequence[str] = (sys.executable,), **options: Any) -> None:
        """--version, --help and the main job of the three scripts in a directory."""
        options["env"] = {"PYTHONPATH": None, **options.get("env", {})}
        with open(os.path.join(support.ROOT, "mlperf_common", "__init__.py"), "rb") as stream:
            version = VERSION.search(stream.read()).group(1).decode()
        for tool in TOOLS:
            script = os.path.join(directory, tool)
            result = support.run([*python, script, "--version"], expect=0, **options)
            self.assertEqual((result.stdout, result.stderr), (f"{tool} {version}\n", ""))
            result = support.run([*python, script, "--help"], expect=0, **options)
            self.assertRegex(result.stdout, rf"(?i)\Ausage: {tool} ")
            self.assertEqual(result.stderr, "")
        self.check_jobs(directory, python, **options)

    def check_jobs(self, directory: str, python: Sequence[str], **options: Any) -> None:
        work = support.make_temporary()
        self.addCleanup(support.remove_tree, work)
        os.chmod(work, 0o777)
        tree = {"a": b"x", "d": {"e": {}, "big": support.Random(3 << 20)}}
        source, copy = make_tree(os.path.join(work, "source"), tree), os.path.join(work, "copy")
        result = support.run([*python, os.path.join(directory, "fastcp"), "-r", source, copy], expect=0, **options)
        self.assertEqual(result.stdout, "")
        self.assert_same_tree(copy, tree)
        sums = []
        for place in (source, copy):
            result = support.run([*python, os.path.join(directory, "fastmd5"), place], expect=0, **options)
            sums.append(result.stdout.replace(place, ""))
        self.assertEqual(sums[0], sums[1])
        self.assertTrue(sums[0].startswith("/a\t0\t1\t9dd4e461268c8034f5c8564e155c67a6\n"), sums[0])
        support.run([*python, os.path.join(directory, "dropcache"), copy], expect=0, **options)


class InPlace(Jobs):
    def test_in_place(self) -> None:
        self.check_tools(support.CLIENT)

    def test_in_place_from_another_directory_by_a_relative_path(self) -> None:
        self.check_tools(os.path.relpath(support.CLIENT, self.tmp), cwd=self.tmp)

    def test_through_links_among_files_named_like_the_library(self) -> None:
        self.make("bin", {**STALE, **{tool: Link(os.path.join(support.CLIENT, tool)) for tool in TOOLS}})
        self.check_tools(self.path("bin"), cwd=self.path("bin"))

    def test_files_named_like_the_library_beside_and_here(self) -> None:
        copy = self.copy_checkout()
        for name, source in STALE.items():
            for directory in (copy, os.path.join(copy, "client")):
                with open(os.path.join(directory, name), "wb") as stream:
                    stream.write(source)
        self.check_tools(os.path.join(copy, "client"), cwd=copy)

    def test_no_litter_in_client(self) -> None:
        copy = self.copy_checkout()
        before = sorted(os.listdir(os.path.join(copy, "client")))
        self.check_tools(os.path.join(copy, "client"), cwd=os.path.join(copy, "client"))
        self.assertEqual(sorted(os.listdir(os.path.join(copy, "client"))), before)
        self.assertEqual(sorted(os.listdir(copy)), ["client", "mlperf_common"])

    @support.needs_nobody
    def test_a_checkout_that_may_not_be_written(self) -> None:
        client = os.path.join(support.public_copy(), "client")
        python = support.command_line("fastcp", user="nobody")[:-1]
        before = support.read_tree(support.public_copy())
        self.check_tools(client, python, user="nobody", cwd=client)
        self.assert_same_tree(support.public_copy(), before)

    def copy_checkout(self) -> str:
        """client and mlperf_common, without caches, in a directory of the test's."""
        for name in ("client", "mlperf_common"):
            shutil.copytree(
                os.path.join(support.ROOT, name),
                self.path("checkout", name),
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        return self.path("checkout")


class StandardDescriptors(Case):
    """Closed, full and broken ones: `sh` prepares them, since Python's own Popen fills the low numbers."""

    def redirected(self, redirection: str, tool: str, *args: str, **options: Any) -> support.Result:
        argv = ["sh", "-c", f'exec "$@" {redirection}', "sh", *support.command_line(tool, *args)]
        return support.run(argv, cwd=self.tmp, **options)

    def test_stdout_that_was_to_be_used(self) -> None:
        self.make("file", b"x" * 100)
        for tool, *args in (
            *((tool, option) for tool in TOOLS for option in ("--version", "--help")),
            ("fastmd5", "file"),
        ):
            for redirection in (">&-", ">/dev/full"):
                with self.subTest(tool, args=args, redirection=redirection):
                    self.assert_refuses(self.redirected(redirection, tool, *args), f"^{tool}: ")

    def test_stdout_that_nobody_reads_any_more(self) -> None:
        self.make("file", b"x" * 100)
        for tool, argument in (("fastcp", "--help"), ("fastmd5", "file")):
            with self.subTest(tool):
                read_end, write_end = os.pipe()
                os.close(read_end)
                result = support.run(support.command_line(tool, argument), cwd=self.tmp, stdout=write_end)
                os.close(write_end)
                self.assertEqual((result.returncode, result.stderr), (1, ""))

    def test_stdout_that_is_not_used(self) -> None:
        tree = {"a": b"x" * 5000, "d": {}}
        self.make("source", tree)
        for number, redirection in enumerate((">&-", ">/dev/full", "<&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full")):
            with self.subTest(redirection):
                result = self.redirected(redirection, "fastcp", "-r", "source", f"copy{number}")
                self.assertEqual(result.returncode, 0, result)
                self.assertEqual(result.stdout, "")
                self.assert_same_tree(self.path(f"copy{number}"), tree)

    def test_errors_with_no_stderr_go_nowhere_and_count(self) -> None:
        self.make("source", {"a": b"x"})
        for redirection in ("2>&-", "<&- >&- 2>&-", "2>/dev/full"):
            for args in (["missing", "copy"], ["--no-such-option"], ["source", "copy"]):
                with self.subTest(redirection, args=args):
                    result = self.redirected(redirection, "fastcp", *args)
                    self.assertEqual(result.returncode, 2 if args[0].startswith("--") else 1, result)
                    self.assert_same_tree(self.tmp, {"source": {"a": b"x"}})

    def test_a_message_never_lands_in_a_file(self) -> None:
        # The first file opened with 2 closed would get that number, and with it every message.
        self.make("source", {f"file{number}": b"x" for number in range(20)})
        result = self.redirected("<&- >&- 2>&-", "fastcp", "-r", "-v", "source", "copy")
        self.assertEqual(result.returncode, 0)
        self.assert_same_tree(self.path("copy"), self.path("source"))


@support.slow
class Installed(Jobs):
    """From `pip install` of a copy, in a fresh virtual environment."""

    place = ""

    @classmethod
    def setUpClass(cls) -> None:
        cls.place = support.make_temporary()
        cls.addClassCleanup(support.remove_tree, cls.place)
        source = cls.copy_source()
        cls.prepare("no venv can be made here", r"ensurepip is not available", sys.executable, "-m", "venv", "venv")
        # What an older version left in the directory of scripts.
        stale = support.File(STALE["direct_io.py"], mtime_ns=1_500_000_000 * 10**9)
        make_tree(cls.venv("bin", "direct_io.py"), stale)
        cls.prepare(
            "pip cannot fetch setuptools here",
            r"No matching distribution found for setuptools|ConnectionError|Temporary failure in name resolution",
            *(cls.venv("bin", "pip"), "install", "--no-deps", "./source"),
        )
        support.remove_tree(source)

    def test_the_manuals_are_there(self) -> None:
        for tool in support.TOOLS:
            for name in (f"share/man/man1/{tool}.1", f"share/bash-completion/completions/{tool}"):
                self.assertTrue(os.path.isfile(self.venv(name)), name)

    @classmethod
    def copy_source(cls) -> str:
        """What setup.py needs, in a directory where it may leave its build."""
        source = os.path.join(cls.place, "source")
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("client", "mlperf_common"):
            shutil.copytree(os.path.join(support.ROOT, name), os.path.join(source, name), ignore=ignored)
        shutil.copy(os.path.join(support.ROOT, "setup.py"), source)
        return source

    @classmethod
    def prepare(cls, reason: str, excuse: str, *argv: str) -> None:
        """Run a command; SkipTest with the reason if its output matches the excuse, else it must succeed."""
        done = subprocess.run(
            argv, cwd=cls.place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output = done.stdout.decode("utf-8", "backslashreplace")
        if done.returncode != 0 and re.search(excuse, output):
            raise unittest.SkipTest(reason)
        if done.returncode != 0:
            raise AssertionError(output)

    @classmethod
    def venv(cls, *names: str) -> str:
        return os.path.join(cls.place, "venv", *names)

    def test_the_scripts_by_their_own_first_line(self) -> None:
        self.check_tools(self.venv("bin"), python=(), cwd="/")

    def test_through_a_link_among_files_named_like_the_library(self) -> None:
        self.make("home", {**STALE, **{tool: Link(self.venv("bin", tool)) for tool in TOOLS}})
        self.check_tools(self.path("home"), python=(), cwd=self.path("home"))

    def test_an_old_copy_of_the_shim_was_replaced(self) -> None:
        with open(self.venv("bin", "direct_io.py"), "rb") as stream:
            self.assertIn(b"mlperf_common.fileio", stream.read())
        self.make("script", b"import direct_io\nprint(direct_io.pread.__module__)\n")
        shutil.copy(self.path("script"), self.venv("bin", "script"))
        self.addCleanup(os.unlink, self.venv("bin", "script"))
        result = support.run([self.venv("bin", "python"), "-B", self.venv("bin", "script")], expect=0)
        self.assertEqual(result.stdout, "mlperf_common.fileio.direct_io\n")

    def test_all_of_the_package_and_nothing_else(self) -> None:
        code = "import mlperf_common; print(mlperf_common.__path__[0])"
        place = support.run([self.venv("bin", "python"), "-c", code], cwd="/", expect=0).stdout.strip()
        self.assertTrue(place.startswith(self.venv("lib")), place)
        sources = {path for path in files_below(os.path.join(support.ROOT, "mlperf_common")) if path.endswith(".py")}
        self.assertEqual({path for path in files_below(place) if not path.endswith(".pyc")}, sources)
        self.assertEqual([name for name in os.listdir(os.path.dirname(place)) if name in ("client", "tests")], [])


def files_below(root: str) -> Set[str]:
    """The relative paths of all files in a tree."""
    return {
        os.path.relpath(os.path.join(directory, name), root) for directory, _, names in os.walk(root) for name in names
    }


if __name__ == "__main__":
    support.main()
