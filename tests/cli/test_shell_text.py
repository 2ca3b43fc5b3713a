"""Commands that are printed for the user to paste."""

from __future__ import annotations

import shlex

import pytest
from carom.cli.shell_text import typed

PIP = ["-m", "pip", "install", "-r"]


def test_for_sh_every_word_is_quoted_where_needed():
    argv = ["/a b/python", *PIP, "/it's/$HOME/requirements.txt"]
    assert shlex.split(typed(argv, windows=False)) == argv


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        ([r"C:\c\python.exe", *PIP, r"C:\c\r.txt"], [r"C:\c\python.exe -m pip install -r C:\c\r.txt"]),
        # Double quotes around an argument mean the same in both shells.
        ([r"C:\c\python.exe", *PIP, r"C:\a b\r.txt"], [r'C:\c\python.exe -m pip install -r "C:\a b\r.txt"']),
        # PowerShell prints a string with which a line begins: `&` runs it.
        (
            [r"C:\a b\python.exe", *PIP, r"C:\a & b\r.txt"],
            [
                r'in cmd:        "C:\a b\python.exe" -m pip install -r "C:\a & b\r.txt"',
                r"in PowerShell: & 'C:\a b\python.exe' -m pip install -r 'C:\a & b\r.txt'",
            ],
        ),
        # It also replaces $NAME within double quotes.
        (
            [r"C:\c\python.exe", *PIP, r"C:\$x's\r.txt"],
            [
                r'in cmd:        C:\c\python.exe -m pip install -r "C:\$x'
                + r"""'s\r.txt\"""".replace('\\"', '"'),
                r"in PowerShell: C:\c\python.exe -m pip install -r 'C:\$x''s\r.txt'",
            ],
        ),
    ],
)
def test_on_windows_a_line_is_for_both_shells_or_there_are_two(argv, lines):
    assert typed(argv, windows=True).splitlines() == ["    " + line for line in lines]
