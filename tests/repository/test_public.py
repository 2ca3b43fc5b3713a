"""The public names of the package, which come without torch until one that needs it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import carom
import pytest


def test_every_public_name_is_there():
    for name in carom.__all__:
        assert getattr(carom, name).__name__ == name
        assert name in dir(carom)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        carom.nonsense  # noqa: B018


def test_importing_the_package_and_its_packer_imports_no_torch():
    code = (
        "import importlib.util, sys\n"
        f"root = {str(Path(__file__).parents[2])!r}\n"
        "spec = importlib.util.spec_from_file_location(\n"
        "    'carom', root + '/__init__.py', submodule_search_locations=[root])\n"
        "sys.modules['carom'] = carom = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(carom)\n"
        "import carom.cli.pack, carom.tools.pack.writer\n"
        "assert carom.CaromError and 'torch' not in sys.modules, 'torch'\n"
        "assert carom.stream and 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
