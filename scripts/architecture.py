"""Draws the packages of core/ from their imports, into docs/architecture.md.

    python scripts/architecture.py            # writes the picture
    python scripts/architecture.py --check    # exit code 1 where the committed picture is not the present one

Needs nothing but Python. An arrow from A to B: a module of A imports a module of B, ``TYPE_CHECKING`` imports included. Arrows
that follow from others are left out of the picture; the table lists every import.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by scripts/architecture.py -->", "<!-- end of the drawing -->"
# The packages from top to bottom. An import may only point down (contract in pyproject.toml, lint-imports checks it).
LAYERS = (
    "session", "budget", "streaming", "placement", "stores", "metrics", "model", "device", "host", "checkpoint", "codec", "plan",
    "common",
)  # fmt: skip


def imports_of(package: str) -> set[str]:
    """Return the other packages of core/ that modules of ``package`` import."""
    folder = ROOT / "core" / package
    found = set()
    for file in folder.rglob("*.py"):
        inside = ("core", *file.relative_to(ROOT / "core").parts[:-1])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = inside[: len(inside) - node.level + 1]
            names = (
                [(*base, *node.module.split("."))] if node.module else [(*base, a.name) for a in node.names]
            )
            found |= {name[1] for name in names if len(name) > 1 and name[0] == "core"}
    return (found & set(LAYERS)) - {package}


def reach(graph: dict[str, set[str]], start: str, without: str) -> set[str]:
    """Return the packages that ``start`` reaches in ``graph`` by two or more arrows, the first of which does not lead
    to ``without``.
    """
    seen: set[str] = set()
    waiting = [package for package in graph[start] if package != without]
    while waiting:
        for package in graph[waiting.pop()]:
            if package not in seen:
                seen.add(package)
                waiting.append(package)
    return seen


def job_of(package: str) -> str:
    """Return the first paragraph of the package's docstring, as one line."""
    text = ast.get_docstring(ast.parse((ROOT / "core" / package / "__init__.py").read_text(encoding="utf-8")))
    return " ".join((text or "").partition("\n\n")[0].split())


def drawing() -> str:
    """Return the Mermaid graph and the table of imports, as Markdown."""
    graph = {package: imports_of(package) for package in LAYERS}
    arrows = [
        f"  {package} --> {other}"
        for package in LAYERS
        for other in LAYERS
        if other in graph[package] and other not in reach(graph, package, other)
    ]
    rows = [
        f"| `core/{package}` | {job_of(package)} | {', '.join(o for o in LAYERS if o in graph[package]) or 'nothing'} |"
        for package in LAYERS
    ]
    return "\n".join(
        [
            "```mermaid",
            "graph TD",
            *arrows,
            "```",
            "",
            "| package | its job | imports |",
            "|---|---|---|",
            *rows,
        ]  # fmt: skip
    )


def page(text: str) -> str:
    """Return the page ``text`` with its drawing replaced by the present one."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{drawing()}\n{END}{after}"


def main(argv: list[str]) -> int:
    """Write the drawing, or with ``--check`` report whether the committed drawing is up to date; return the exit
    code.
    """
    text = PAGE.read_text(encoding="utf-8")
    new = page(text)
    if "--check" in argv:
        if new != text:
            print(
                "docs/architecture.md is not what the imports are: run python scripts/architecture.py",
                file=sys.stderr,
            )
        return int(new != text)
    if new != text:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
