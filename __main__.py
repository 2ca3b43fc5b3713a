"""`python -m carom`, and `python FOLDER` for a checkout that is not installed.

The second form needs no installed package: embedded Pythons, such as that of the portable ComfyUI, ignore both the
current folder and PYTHONPATH.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

name = __package__
if not name:  # started as `python FOLDER`, which put the folder itself on the path
    name, folder = "carom", Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != folder]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

sys.exit(importlib.import_module(f"{name}.cli.main").main())
