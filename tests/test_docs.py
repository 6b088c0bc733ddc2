# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""README.md, CLAUDE.md and tests/README.md say what is so: commands are run, tables are tried, names exist."""

# Takes about 8 s
from __future__ import annotations

import glob
import importlib
import os
import re
import sys
from typing import List, Tuple

import manuals
import support
from support import ROOT, Link, TestCase, run_tool

sys.path.insert(0, ROOT)

TREE = {
    "a": b"a", "b": b"b", "src": {"f": b"f"}, "dir": {}, "link": Link("dir"), "full": {"a": b"old", "b": {}},
}  # fmt: skip


def text_of(name: str) -> str:
    """A document of the tree."""
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


README = text_of("README.md")


def section(title: str, level: str = "##") -> str:
    """The text below a heading of README."""
    return README.split(f"\n{level} {title}\n", 1)[1].split(f"\n{level} ", 1)[0]


def rows(text: str) -> List[Tuple[str, str]]:
    """The two cells of each row of its tables, headings left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip("| ") for cell in line.split(" | ", 1)]
        if line[:1] == "|" and len(cells) == 2 and cells[0] not in ("option", "command", "status"):
            found.append((cells[0], cells[1]))
    return found


class Readme(TestCase):
    def test_sections_in_order(self) -> None:
        titles = re.findall(r"(?m)^## (.*)$", README)
        self.assertEqual(
            titles,
            [
                "Copying", "Running the tests", "Verifying a copy", "Options", "Next to `cp`", "Exit statuses",
                "Measured speed", "Installing", "Troubleshooting",
            ],
        )  # fmt: skip

    def test_the_command_that_copies(self) -> None:
        command = re.search(r"```bash\n(.*)\n```", section("Copying"))
        self.assertIsNotNone(command)
        source = self.make("SRC", TREE)
        line = (command[1] if command else "").replace("SRC", source).replace("DEST", self.path("DEST"))
        support.run(["bash", "-ec", line], cwd=ROOT, expect=0)
        self.assertEqual(sorted(os.listdir(self.path("DEST"))), sorted(TREE))

    def test_the_command_that_runs_the_tests(self) -> None:
        self.assertIn("```bash\npython3 tests/run_tests.py\n```", section("Running the tests"))
        self.assertIn("python3 tests/run_tests.py", text_of(".ci/run"))

    def test_the_commands_that_verify(self) -> None:
        blocks = re.findall(r"```bash\n(.*?)```", section("Verifying a copy"), re.DOTALL)
        self.assertEqual(len(blocks), 2)
        self.make("SRC", TREE)
        env = {"PATH": os.path.join(ROOT, "client") + os.pathsep + os.environ["PATH"]}
        for block in blocks:
            support.run(["bash", "-ec", block], cwd=self.tmp, env=env, expect=0)
        with open(self.path("DEST", "a"), "ab") as file:
            file.write(b"!")
        for line in ("fastmd5 --compare SRC DEST", "fastmd5 -C DEST -c sums --extra --quiet"):
            self.assertIn(line, "".join(blocks))
            support.run(["bash", "-ec", line], cwd=self.tmp, env=env, expect=1)

    def test_options_are_those_of_the_help(self) -> None:
        for tool in support.TOOLS:
            with self.subTest(tool):
                table = rows(section(tool, "###").split("\n## ")[0])
                told = set(re.findall(r"(?<![\w-])(--?[a-zA-Z0-9][\w-]*)", " ".join(row[0] for row in table)))
                parser = manuals.parser_of(tool)
                self.assertEqual(told, set(parser._option_string_actions))
                usage = run_tool(tool, "--help", expect=0).stdout
                for action in parser._actions:
                    self.assertRegex(usage, r"(?m)^  .*%s\b" % re.escape(action.option_strings[0]))

    def test_the_tables_next_to_cp(self) -> None:
        made, refused = (rows(part) for part in section("Next to `cp`").split("| refused |"))
        self.assertEqual((len(made), len(refused)), (12, 13))
        for number, (command, result) in enumerate(made):
            with self.subTest(command):
                place = self.make(f"made{number}", TREE)
                args = command.strip("`").split()[1:]
                run_tool("fastcp", *args, cwd=place, expect=0)
                for name in re.findall(r"`([^`]+)`", result):
                    self.assertTrue(os.path.isfile(os.path.join(place, name)), name)
        for number, (command, result) in enumerate(refused):
            with self.subTest(command):
                place = self.make(f"refused{number}", TREE)
                before = support.read_tree(place)
                args = [word.strip("'") for word in command.strip("`").split()[1:]]
                said = run_tool("fastcp", *args, cwd=place, expect=1).stderr
                self.assertIn(f"fastcp: {result.strip('`')}\n", said)
                self.assertEqual(support.differences(before, support.read_tree(place)), [])

    def test_quoted_messages_exist(self) -> None:
        code = "".join(
            text_of(os.path.relpath(path, ROOT)) for path in glob.glob(os.path.join(ROOT, "mlperf_common/fileio/*.py"))
        )
        for words in (
            "changed while it was being copied", "changed since it was listed", "directory changed while it was being",
            "vanished since it was listed", "collides with another name in the destination's directory",
            "cannot rename without replacing", "could not be kept; their group bits are cleared", "was killed by %s",
            "the limit of open files (ulimit -n)", "temporary files of other runs",
        ):  # fmt: skip
            with self.subTest(words):
                self.assertIn(words, code)
                self.assertIn(words.replace("%s", "SIGKILL"), README.replace("\n", " "))

    def test_defaults(self) -> None:
        fastcp = importlib.import_module("mlperf_common.fileio.fastcp")
        args = fastcp.make_parser().parse_args([])
        self.assertEqual((args.buffer_size, args.direct, args.follow), (8 << 20, "auto", "all"))
        self.assertEqual(args.num_workers, 16)

    def test_exit_statuses(self) -> None:
        self.assertEqual([row[0] for row in rows(section("Exit statuses"))], ["0", "1", "2", "128 + N"])


class Others(TestCase):
    def test_claude_names_every_module_on_its_floor(self) -> None:
        text = text_of("CLAUDE.md")
        self.assertLessEqual(text.count("\n"), 60)
        layout = importlib.import_module("test_layout")
        floors = re.findall(r"(?ms)^\d\. (\w+): (.*?)(?=^\d\. |^\n|^A copy)", text)
        told = {name: set(re.findall(r"`(\w+)`", words)) for name, words in floors}
        self.assertEqual(told, {floor: set(names) for floor, names in layout.FLOORS.items()})

    def test_claude_s_commands_are_there(self) -> None:
        block = re.search(r"```bash\n(.*?)```", text_of("CLAUDE.md"), re.DOTALL)
        for line in (block[1] if block else "").splitlines():
            words = line.split("#")[0].split()
            file = next(word for word in words if "/" in word)
            self.assertTrue(os.path.exists(os.path.join(ROOT, file)), file)

    def test_every_test_file_is_in_the_readme_of_the_tests(self) -> None:
        text = text_of("tests/README.md")
        for path in glob.glob(os.path.join(ROOT, "tests", "*.py")):
            name = os.path.basename(path)
            if name.startswith("test_"):
                self.assertIn(f"`{name}`", text)
        for name in set(re.findall(r"`(test_\w+\.py)`", text)):
            self.assertTrue(os.path.exists(os.path.join(ROOT, "tests", name)), name)


if __name__ == "__main__":
    support.main()
