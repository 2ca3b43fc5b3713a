"""The package is the checkout: what pyproject lists is what is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

NOT_PACKAGES = {"tests", "docs", "examples", "build", "dist"}


def project_of(root: Path) -> dict:
    """Return the [project] table of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]


def test_every_folder_with_an_init_is_listed(root: Path):
    listed = set(
        tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    )
    found = {"carom"}
    for init in root.glob("*/**/__init__.py"):
        parts = init.parent.relative_to(root).parts
        if parts[0] not in NOT_PACKAGES and not parts[0].startswith((".", "venv")):
            found.add(".".join(("carom", *parts)))
    assert listed == found


def test_requirements_mirror_dependencies_without_torch(root: Path):
    project = project_of(root)
    lines = (root / "requirements.txt").read_text("utf-8").splitlines()
    mirrored = {line for line in lines if line and not line.startswith("#")}
    assert mirrored == {d for d in project["dependencies"] if not d.startswith("torch")}


def test_the_version_is_the_same_everywhere_and_has_a_section_in_the_changelog(root: Path, carom_cli):
    version = project_of(root)["version"]
    done = carom_cli("--version")
    assert (done.returncode, done.stdout) == (0, f"carom {version}\n")
    assert f"\n## [{version}] - 20" in (root / "CHANGELOG.md").read_text("utf-8")


def test_every_dependency_has_its_reason(root: Path):
    project, page = project_of(root), (root / "docs" / "dependencies.md").read_text("utf-8")
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *(line for lines in extras.values() for line in lines)):
        name = re.split(r"[\[>=<;]", requirement)[0]
        assert name == project["name"] or re.search(rf"\b{name}\b", page), name
    for extra in extras:
        assert f"| `{extra}` |" in page, extra


def test_the_extra_all_has_every_extra_of_a_user(root: Path):
    extras = project_of(root)["optional-dependencies"]
    (line,) = extras["all"]
    named = set(line.removeprefix("carom[").removesuffix("]").split(","))
    assert named == set(extras) - {"all", "test"}


def test_python_versions_are_claimed_from_the_required_one_on(root: Path):
    project = project_of(root)
    least = project["requires-python"].removeprefix(">=")
    claimed = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    page = (root / "docs" / "dependencies.md").read_text("utf-8")
    assert claimed and all(
        tuple(map(int, v.split("."))) >= tuple(map(int, least.split("."))) for v in claimed
    )
    for version in claimed:
        assert f"| {version}" in page, f"docs/dependencies.md does not say how Python {version} was tested"


def test_every_import_inside_the_package_is_relative(root: Path):
    for path in root.glob("**/*.py"):
        parts = path.relative_to(root).parts
        if parts[0] in NOT_PACKAGES or parts[0].startswith((".", "venv")):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert not line.strip().startswith(("import carom", "from carom")), f"{path}:{number}"
