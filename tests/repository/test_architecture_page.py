"""docs/architecture.md shows the imports that core/ has."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_drawing_of_the_packages_is_current():
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "architecture.py", "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
