"""What runs the passes is used through `Runner` outside core/streaming: rule R1 of core/streaming/runner.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core/session", "core/budget", "core/metrics", "core/placement", "nodes", "toolkit_ext")
NAMES = {"runner", "_runner", "streamer", "_streamer"}  # of variables and attributes that hold a runner
# The file that makes the streamer, and the one that hands it on to what serves the layout with it (hooks, tier).
MAY_IMPORT = {"core/session/weight_pool.py", "core/session/layout_manager.py"}
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def runner() -> ast.ClassDef:
    tree = ast.parse((ROOT / "core/streaming/runner.py").read_text("utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Runner")


def methods() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in runner().body if isinstance(node, ast.FunctionDef)}


def attributes() -> set[str]:
    return {
        node.target.id
        for node in runner().body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def uses(source: str) -> Iterator[tuple[int, str]]:
    """The line and the member of each use of a runner in ``source``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and name_of(node.value) in NAMES:
            yield node.lineno, node.attr


def imports_streamer(source: str) -> bool:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
    return any("streaming.streamer" in name for name in names)


def test_a_runner_has_at_most_ten_members_and_each_is_described():
    assert len(methods().keys() | attributes()) <= 10
    assert [name for name, method in methods().items() if not ast.get_docstring(method)] == []
    described = ast.get_docstring(runner()) or ""
    assert [name for name in attributes() if f"``{name}``: " not in described] == []


def test_uses_are_found():
    source = "with layout.runner.lock:\n    self._streamer.region.nbytes\nplacement.stream(units, streamer)"
    assert list(uses(source)) == [(1, "lock"), (2, "region")]
    assert imports_streamer("from ..streaming.streamer import Streamer")
    assert imports_streamer("from carom.core.streaming import streamer")
    assert not imports_streamer("from ..streaming.runner import Runner")


def test_files_outside_streaming_use_members_of_the_interface_only():
    members = methods().keys() | attributes()
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in FILES}
    beyond = {name: [use for use in uses(text) if use[1] not in members] for name, text in texts.items()}
    assert {name: found for name, found in beyond.items() if found} == {}
    assert {name for name, text in texts.items() if imports_streamer(text)} <= MAY_IMPORT
