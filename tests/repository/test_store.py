"""Streamed weights are fetched, read and written through the members of `Store` only (core/stores/store.py)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STREAMING = sorted((ROOT / "core/streaming").rglob("*.py"))

# What core/streaming still asks of a tier beside that, and with what each goes. The list only gets shorter.
LEFT = {
    "backings": "the list of units becomes the module tree's",
    "staging_bytes": "staging becomes the engine's",
    "start": "reads from files begin, and divide ram: the constructor of that store",
    "end_pass": "residents from files become cached units; ranks compare their gathers in the route",
    "end_backward": "ranks compare their gathers in the route",
}


def store() -> ast.ClassDef:
    tree = ast.parse((ROOT / "core/stores/store.py").read_text("utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Store")


def members() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in store().body if isinstance(node, ast.FunctionDef)}


def uses(source: str, name: str) -> Iterator[str]:
    """The members that ``source`` uses of variables and attributes called ``name``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            held = node.value
            called = (
                held.id
                if isinstance(held, ast.Name)
                else held.attr
                if isinstance(held, ast.Attribute)
                else ""
            )
            if called.lstrip("_") == name:
                yield node.attr


def test_a_store_has_at_most_ten_members_and_each_is_described():
    assert 0 < len(members()) <= 10
    described = ast.get_docstring(store()) or ""
    assert [
        name
        for name, member in members().items()
        if not ast.get_docstring(member) and f"``{name}``: " not in described
    ] == []


def test_uses_are_found():
    source = "self.store.fetch(unit)\nstreamer._store.close()\nstore = self.tier\nstore.ready(unit)"
    assert list(uses(source, "store")) == ["fetch", "close", "ready"]


def test_streaming_uses_members_of_the_interface_only():
    texts = {path.name: path.read_text("utf-8") for path in STREAMING}
    beyond = {name: set(uses(text, "store")) - members().keys() for name, text in texts.items()}
    assert {name: found for name, found in beyond.items() if found} == {}
    used = {member for text in texts.values() for member in uses(text, "tier")}
    assert used == LEFT.keys()
