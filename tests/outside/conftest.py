"""Makes the helpers of this folder importable: it is no package, and not on the path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for name in ("harness", "tiny_transformers"):
    spec = importlib.util.spec_from_file_location(f"outside_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    sys.modules[f"outside_{name}"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
