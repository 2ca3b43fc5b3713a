"""Runs a benchmark module of this checkout, whatever its folder is called and whether or not it is installed.

    python3 benchmarks/engines/launch.py suite --out DIR

Standard library only until the module itself is imported. The runner starts its workers through it too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_checkout() -> None:
    """Make the package name `carom` mean this checkout, ahead of any installed one."""
    spec = importlib.util.spec_from_file_location(
        "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package at {ROOT}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["carom"] = package
    spec.loader.exec_module(package)


def main(argv: list[str]) -> int:
    """`argv`: the module of the package (worker or suite), then its own arguments."""
    if not argv or argv[0] not in ("worker", "suite"):
        print("usage: launch.py {worker,suite} ...", file=sys.stderr)
        return 2
    # The script's own folder must not shadow anything: it is no package folder.
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks" / "engines"
    ]
    load_checkout()
    return importlib.import_module(f"carom.benchmarks.engines.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
