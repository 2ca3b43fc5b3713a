"""Lines of the README and the docs that users paste are one and the same command in cmd, Windows PowerShell 5.1 and bash.

Each function below divides a line as its shell does, for the plain subset that the lines may use, and raises ValueError
for everything that is special in that shell.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

# Special outside double quotes, and inside them. A '#' begins a comment in PowerShell and bash, but not in cmd.
SPECIAL = {
    "cmd": (r"[&|<>^()%!']", r"[%!]"),
    "powershell": (r"[&|<>;()$`{},@']|(?<!\S)#", r"[$`]"),
    "bash": (r"[&|<>;()$`{}*?~!'\\]|(?<!\S)#", r"[$`!\\]"),
}


def divide(line: str, shell: str) -> list[str]:
    """Return the words of a line. Raises ValueError for what this shell would not pass on as it stands."""
    outside, inside = SPECIAL[shell]
    for number, part in enumerate(line.split('"')):
        found = re.search(inside if number % 2 else outside, part)
        if found:
            raise ValueError(f"{shell}: {found[0]!r} in {line!r}")
    if line.count('"') % 2 or line != line.strip() or re.search(r'\\"', line):
        raise ValueError(f"{shell}: quotes or spaces of {line!r}")
    words = ["".join(word) for word in re.findall(r'((?:[^\s"]|"[^"]*")+)', line)]
    if words[0].startswith('"'):
        raise ValueError(f"{shell}: {line!r} begins with a string, which PowerShell prints")
    if shell == "bash" and [word.replace('"', "") for word in words] != shlex.split(line):
        raise ValueError(f"{shell}: {line!r} is divided in another way")
    return [word.replace('"', "") for word in words]


def same_command(line: str, shells: tuple[str, ...] = ("cmd", "powershell", "bash")) -> list[str]:
    """Return the words of a line, which must be the same in all of ``shells``."""
    words = [divide(line, shell) for shell in shells]
    if any(other != words[0] for other in words):
        raise ValueError(f"{line!r} is not the same command in {shells}")
    return words[0]


def lines_of(text: str, languages: str) -> list[str]:
    """Return the lines of the code blocks in ``languages`` (a pattern)."""
    found = re.findall(rf"^```(?:{languages})\n(.*?)^```", text, re.M | re.S)
    return [line for block in found for line in block.splitlines() if line]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/comfyui.md", "docs/ai-toolkit.md"])
def test_install_lines_are_the_same_command_in_three_shells(root: Path, page: str):
    lines = lines_of((root / page).read_text("utf-8"), "sh|bash")
    # A variable before a command is bash's: only tests of developers begin so.
    pasted = [line for line in lines if not re.match(r"[A-Z_]+=", line)]
    assert len(pasted) >= 2
    for line in pasted:
        assert same_command(line)[:2] == ["python", "-m"]


@pytest.mark.parametrize("page", ["docs/windows.md", "docs/ai-toolkit.md"])
def test_windows_lines_are_the_same_command_in_cmd_and_powershell(root: Path, page: str):
    lines = lines_of((root / page).read_text("utf-8"), "bat")
    assert len(lines) >= 2
    for line in lines:
        python = same_command(line, ("cmd", "powershell"))[0]
        # By its path: `python` alone may be the placeholder of the Microsoft Store.
        assert re.fullmatch(r"\.\\(\w+|\.venv)(\\Scripts)?\\python\.exe", python)


def test_the_windows_page_has_a_line_for_each_way_of_installing(root: Path):
    text = (root / "docs" / "windows.md").read_text("utf-8")
    lines = lines_of(text, "bat")
    for python in (r".\python_embeded\python.exe -s -m pip", r".\.venv\Scripts", r".\venv\Scripts"):
        assert any(line.startswith(python) for line in lines)
    assert "ot been run on Windows" in text and "Microsoft Store" in text
    for page in ("README.md", "docs/amd.md", "docs/faq.md", "docs/comfyui.md", "docs/ai-toolkit.md"):
        assert "windows.md" in (root / page).read_text("utf-8"), page


def test_the_readme_sends_only_amd_to_the_amd_page(root: Path):
    text = (root / "README.md").read_text("utf-8")
    assert re.findall(r"([\w ]+):\s+\[docs/amd\.md\]", text) == [" AMD"]


@pytest.mark.parametrize(
    "line",
    [
        "python -m pip install -e . && python -m pytest",
        "python -m pip install x  # no package index",
        "python -m pip install 'a b'",
        '"C:\\a b\\python.exe" -m pip',
        "python -m pip install C:\\carom",
        "python -m pip install $HOME/carom",
        "python -m pip install %USERPROFILE%\\carom",
        "python -m pip; python -m pytest",
        'python -m x "C:\\a b\\"',
        'python -m x "a',
    ],
)
def test_what_one_of_the_shells_does_not_take_is_found(line: str):
    with pytest.raises(ValueError):
        same_command(line)
