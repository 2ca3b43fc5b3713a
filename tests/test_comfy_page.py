"""ComfyUI's page in a real browser: our nodes, a workflow out of the template browser, a run, what the nodes say.

COMFYUI_PATH=/path/to/ComfyUI python -m pytest tests/test_comfy_page.py; CAROM_SCREENSHOT names a file to keep the picture in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests_comfy_server import PATHS, PYTHON, REASON, Server
from tests_web_page import CHROMIUM, DRIVER, Page

pytestmark = [
    pytest.mark.skipif(not PATHS, reason=REASON),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
    pytest.mark.timeout(600),
]
WORKFLOW = "carom_flux_text_to_image"
NODE = "const node = app.graph._nodes.find(n => n.type === arguments[0]);"
SET = NODE + "node.widgets.find(w => w.name === arguments[1]).value = arguments[2]; return 1;"


@pytest.fixture(scope="module", params=PATHS or ["none"], ids=lambda path: Path(path).name)
def server(request, tmp_path_factory, carom_cli):
    has_page = subprocess.run([PYTHON, "-c", "import comfyui_frontend_package"], capture_output=True)
    if has_page.returncode:
        pytest.skip("comfyui-frontend-package is not installed where ComfyUI runs")
    base = tmp_path_factory.mktemp("comfy-page")
    server = Server(request.param, base)
    server.prepare()
    # The page marks files that are not there; of this one only the name is looked at.
    (base / "models" / "text_encoders" / "t5xxl_fp16.safetensors").write_bytes(b"")
    done = carom_cli("install-comfyui", str(base))
    assert done.returncode == 0, done.stderr
    try:
        server.start_on_cpu()
        server.post(
            "/settings/Comfy.TutorialCompleted", True
        )  # else the first visit opens a dialog of its own
        yield server
    finally:
        server.stop()
        shutil.rmtree(base / "models", ignore_errors=True)


@pytest.fixture
def page(server):
    page = Page(1680, 1000)
    try:
        page.open(f"http://127.0.0.1:{server.port}")
        page.wait("return window.app && app.graph && app.extensionManager && LiteGraph.registered_node_types.KSampler ? 1 : 0",
                  seconds=120)  # fmt: skip
        yield page
    finally:
        page.close()


def test_nodes_a_template_that_loads_and_runs(server, page):
    known = page.run(
        "return Object.keys(LiteGraph.registered_node_types).filter(n => /^Carom(?!Test)/.test(n))"
    )
    assert set(known) == {
        name for name in server.get("/object_info") if name.startswith("Carom") and "Test" not in name
    }

    page.click('button[aria-label^="Templates"]')
    page.click("div[class*=cursor-pointer], button, [role=button]", "carom")
    page.wait(
        "const i = document.querySelector(arguments[0]); return i && i.complete && i.naturalWidth > 400 ? 1 : 0",
        f'[data-testid="template-workflow-{WORKFLOW}"] img',
    )
    page.click(f'[data-testid="template-workflow-{WORKFLOW}"]')
    page.wait("return app.graph._nodes.some(n => n.type === 'CaromLoadDiffusionModel') ? 1 : 0")

    # What this machine has: a small model, CLIP-L alone, a CPU.
    for kind, widget, value in (
        ("CaromLoadDiffusionModel", "mode", "stream"), ("CaromLoadDiffusionModel", "vram", "10MiB"),
        ("CaromLoadCLIP", "clip_name", "clip_l.safetensors"), ("CaromLoadCLIP", "clip_name2", "none"),
        ("CaromLoadCLIP", "type", "stable_diffusion"), ("EmptySD3LatentImage", "width", 256),
        ("EmptySD3LatentImage", "height", 256), ("KSampler", "steps", 4),
    ):  # fmt: skip
        assert page.run(SET, kind, widget, value) == 1
    before = set(server.get("/history"))
    page.click('[data-testid="queue-button"], .comfy-queue-btn', "Run")
    page.wait("return fetch('/history').then(a => a.json()).then(h => Object.keys(h).length > arguments[0] ? 1 : 0)",
              len(before), seconds=300)  # fmt: skip
    (ran,) = set(server.get("/history")) - before
    outcome = server.get(f"/history/{ran}")[ran]
    assert outcome["status"]["status_str"] == "success", outcome["status"]
    kinds = {item["class_type"]: name for name, item in outcome["prompt"][2].items()}
    text = outcome["outputs"][kinds["CaromReport"]]["text"][0]
    assert "streams" in text and outcome["outputs"][kinds["SaveImage"]]["images"]
    # ... and the page shows it: on the report's node, and on the loader's while it ran.
    for kind in ("CaromReport", "CaromLoadDiffusionModel"):
        page.wait(NODE + "return node.widgets.some(w => String(w.value).includes('streams')) ? 1 : 0", kind)
    picture = page.screenshot()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    if keep := os.environ.get("CAROM_SCREENSHOT"):
        Path(keep).write_bytes(picture)
