"""A script that runs a benchmark module of this checkout, for any folder name, installed or not.

    python3 benchmarks/engines/launch.py suite --out DIR

Only the standard library is used until the module is imported. The runner starts its workers with this script too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_checkout() -> None:
    """Import this checkout as the package `carom`, in preference to an installed package."""
    spec = importlib.util.spec_from_file_location(
        "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package at {ROOT}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["carom"] = package
    spec.loader.exec_module(package)


def main(argv: list[str]) -> int:
    """Run the module ``argv[0]`` ("worker" or "suite") with the remaining arguments; return its exit code."""
    if not argv or argv[0] not in ("worker", "suite"):
        print("usage: launch.py {worker,suite} ...", file=sys.stderr)
        return 2
    # Remove the script's folder from sys.path, because its modules could shadow others.
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks" / "engines"
    ]
    load_checkout()
    return importlib.import_module(f"carom.benchmarks.engines.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
