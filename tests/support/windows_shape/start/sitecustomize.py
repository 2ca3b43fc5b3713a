"""Python imports this file when it starts, if its folder is on PYTHONPATH: brings the process into the Windows shape."""

import importlib.util
import os
import sys
from pathlib import Path

NAME = "carom_windows_shape"


def _start() -> None:
    # Read before `pathlib` is used for anything else: on Python 3.10 it keeps functions of `os`.
    package = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location(
        NAME, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    module.install()


if os.environ.get("CAROM_WINDOWS_SHAPE"):
    _start()
