"""No model is on the device whole while it loads: every model class of a real ai-toolkit, with models of full size.

AI_TOOLKIT_PATH names a checkout, AI_TOOLKIT_PYTHON the Python that runs it. Its own loaders run, with Carom around them as in
a job; the device is one of fake tensors on which bytes are counted (`aitoolkit_counting.py`), and no GPU is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("AI_TOOLKIT_PATH", "")
pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="AI_TOOLKIT_PATH is not set: no ai-toolkit to test against"),
    pytest.mark.timeout(3000),
]

SUPPORT = Path(__file__).resolve().parents[1] / "support" / "ai_toolkit"
ARCHS = (
    "sd1", "sd2", "sdxl", "ssd", "vega", "sd3", "pixart", "pixart_sigma", "auraflow", "flux", "lumina2", "wan21", "wan21_i2v",
    "cogview4", "ace_step_15", "ace_step_15_xl", "chroma", "chroma_radiance", "hidream", "hidream_e1", "f-lite", "omnigen2",
    "flux_kontext", "wan22_5b", "wan22_14b_i2v", "wan22_14b", "qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "flux2",
    "zimage", "ltx2", "ltx2.3", "ltx2.5", "flux2_klein_4b", "flux2_klein_9b", "zeta_chroma", "ernie_image", "nucleus_image",
    "hidream_o1", "zimage_l2p", "anima", "ideogram4", "prx_pixel", "krea2", "boogu_image", "boogu_image_edit", "mageflow",
    "mageflow_edit", "minimax_h3", "minimax_h3_ref2va", "flex2",
)  # fmt: skip
CHANGES = {
    "plain": (),
    "quantised": ("quantize=true", "quantize_te=true", 'qtype="float8"', 'qtype_te="float8"'),
}
MOVES = ("wan21", "flux2", "ideogram4", "prx_pixel", "cogview4")  # of those that do without Carom


def run(folder: Path, *words: str) -> dict[str, dict]:
    """arch -> what `aitoolkit_classes.py` tells of it."""
    links = folder / "path"
    links.mkdir()
    (links / "carom").symlink_to(SUPPORT.parents[2], target_is_directory=True)
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT / "aitoolkit_site"), str(links)]), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg", "TMPDIR": str(folder),
    }  # fmt: skip
    command = [
        os.environ.get("AI_TOOLKIT_PYTHON", sys.executable),
        str(SUPPORT / "aitoolkit_classes.py"),
        *words,
    ]
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=2700)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.removeprefix("LOADED ") for line in done.stdout.splitlines() if line.startswith("LOADED "))
    return {told["arch"]: told for told in map(json.loads, lines)}


@pytest.fixture(scope="module", params=CHANGES)
def loaded(request, tmp_path_factory):
    return run(tmp_path_factory.mktemp("classes"), *CHANGES[request.param])


@pytest.mark.parametrize("arch", ARCHS)
def test_no_model_is_on_the_device_whole(loaded, arch):
    told = loaded.get(arch, {"error": "it took too long, or ai-toolkit has no such class"})
    assert "error" not in told, told["error"]
    assert not told["whole"], "while it loads, or when the job says .to(device) afterwards"
    assert told["streams"] and not told["on_device"], "its models wait on the host"
    assert told["peak"] < max(told["streams"].values()) / 2, "bytes that belong to no model yet count too"


def test_these_are_all_of_its_classes(loaded):
    assert set(loaded) == set(ARCHS)


def test_without_carom_they_are_there_whole(tmp_path):
    """What counts can see it."""
    told = run(tmp_path, "--plain", *MOVES)
    assert all(told[arch]["moved"] for arch in MOVES), told
