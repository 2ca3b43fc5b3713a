"""The package is the checkout: what pyproject lists is what is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

NOT_PACKAGES = {"tests", "docs", "examples", "build", "dist"}


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
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (root / "requirements.txt").read_text("utf-8").splitlines()
    mirrored = {line for line in lines if line and not line.startswith("#")}
    assert mirrored == {d for d in project["dependencies"] if not d.startswith("torch")}


def test_every_import_inside_the_package_is_relative(root: Path):
    for path in root.glob("**/*.py"):
        parts = path.relative_to(root).parts
        if parts[0] in NOT_PACKAGES or parts[0].startswith((".", "venv")):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert not line.strip().startswith(("import carom", "from carom")), f"{path}:{number}"
