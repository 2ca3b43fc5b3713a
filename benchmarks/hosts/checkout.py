"""Import of this checkout as the package ``carom``, for programs that are run by path, whatever its folder is called."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def load(name: str, root: Path = ROOT) -> Any:
    """Return the module ``carom.NAME`` of the checkout in folder ``root``."""
    if "carom" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "carom", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["carom"] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"carom.{name}")
