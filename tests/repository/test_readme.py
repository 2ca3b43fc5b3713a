"""The paper is true: commands, links, files and examples that README and CONTRIBUTING name exist and work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from carom.cli.main import COMMANDS
from torch import nn

PAPERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/dependencies.md")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text("utf-8")


@pytest.mark.parametrize("paper", PAPERS)
def test_local_links_and_pictures_exist(root: Path, paper: str):
    text = (root / paper).read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert ((root / paper).parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("paper", ["README.md", "CONTRIBUTING.md"])
def test_files_named_in_code_spans_exist(root: Path, paper: str):
    text = re.sub(r"```.*?```", "", (root / paper).read_text("utf-8"), flags=re.S)
    made_by_runs = {"carom-demo/", "benchmarks/records/"}
    for span in re.findall(r"`([^`\n]+)`", text):
        looks_like_a_path = re.fullmatch(r"[\w.-]+(/[\w.-]*)+|[\w-]+\.(py|md|toml|txt|png)", span)
        if looks_like_a_path and span not in made_by_runs:
            assert (root / span).exists(), span


def test_the_first_command_installs_and_runs_the_demo_and_the_second_the_tests(readme: str):
    commands = [line for block in blocks(readme, "sh") for line in block.splitlines() if line]
    assert commands == [
        "python -m pip install -e .",
        "python -m carom demo",
        'python -m pip install -e ".[test]"',
        "python -m pytest",
    ]


def test_the_extra_the_second_command_names_has_what_the_tests_need(root: Path, readme: str):
    assert ".[test]" in shlex.split(blocks(readme, "sh")[1])
    extra = re.search(r"^test = \[(.*)\]$", (root / "pyproject.toml").read_text("utf-8"), re.M)
    assert extra
    assert {"pytest", "pytest-timeout", "hypothesis", "ruff", "mypy"} <= set(
        re.findall(r'"([\w-]+)', extra[1])
    )


def test_the_command_list_is_the_command_list(readme: str):
    assert set(re.findall(r"`carom ([\w-]+)`", readme)) == COMMANDS.keys()


def test_the_readme_is_short(readme: str):
    assert len(readme.split()) <= 900


def test_the_python_example_runs_as_it_stands(readme: str):
    (example,) = blocks(readme, "python")
    assert len([line for line in example.splitlines() if line]) <= 6
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    batches = [torch.randn(4, 32) for _ in range(2)]
    before = [p.detach().clone() for p in model.parameters()]
    printed: list[str] = []
    exec(example.replace('"8GiB"', '"64KiB"'), {"model": model, "batches": batches, "print": printed.append})
    assert "within the budget" in printed[0]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_measured_table_has_its_place(readme: str):
    assert len(re.findall(r"<!-- bench:start -->\n.*?<!-- bench:end -->", readme, re.S)) == 1


def test_every_dependency_has_its_reason(root: Path):
    reasons = (root / "docs" / "dependencies.md").read_text("utf-8")
    project = (root / "pyproject.toml").read_text("utf-8")
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.S | re.M)
    for name, version in re.findall(r'"([\w-]+)>=([\d.]+)"', listed):
        assert f"| {name} >= {version} |" in reasons, name
    (extras,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)\n\n", project, re.S | re.M)
    for name in re.findall(r'"([\w-]+)[>=<]', extras):
        assert re.search(rf"\b{name}\b", reasons), name


@pytest.mark.parametrize("paper", PAPERS)
def test_papers_name_no_folder_of_their_writers(root: Path, paper: str):
    assert not re.search(r"(/home/|/root/|/tmp/|/work/|C:\\Users)", (root / paper).read_text("utf-8"))


@pytest.mark.skipif(os.name == "nt", reason="a bash script")
def test_ci_runs_the_readmes_test_command(root: Path, readme: str):
    script = (root / ".ci" / "run").read_text("utf-8")
    assert os.access(root / ".ci" / "run", os.X_OK)
    (reads,) = re.findall(r"^(test_commands=\$\(.*\)\nif .*?^fi\n)", script, re.M | re.S)
    done = subprocess.run(
        ["bash", "-c", reads + 'echo "$test_commands"'], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == blocks(readme, "sh")[1] and not done.stderr
    assert script.endswith('\neval "$test_commands"\n')
    assert "ruff check" in script and "ruff format --check" in script and "mypy" in script
