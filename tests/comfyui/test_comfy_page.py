"""ComfyUI's page in a real browser: our nodes, a workflow out of the template browser, a run, what the nodes say.

COMFYUI_PATH=/path/to/ComfyUI python -m pytest tests/comfyui/test_comfy_page.py; CAROM_SCREENSHOTS names a folder to keep pictures in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests_comfy_server import PATHS, PYTHON, REASON, Server
from tests_web_page import CHROMIUM, DRIVER, Page

pytestmark = [
    pytest.mark.skipif(not PATHS, reason=REASON),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
    pytest.mark.timeout(600),
]
WORKFLOWS = sorted((Path(__file__).resolve().parents[2] / "workflows").glob("*.json"))
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
    # The page marks files that are not there. Of those that no test loads, only the names are looked at.
    for path in WORKFLOWS:
        for item in json.loads(path.read_text("utf-8"))["nodes"]:
            for model in item["properties"].get("models", []):
                file = base / "models" / model["directory"] / model["name"]
                file.parent.mkdir(exist_ok=True)
                if not file.exists():
                    file.write_bytes(b"")
    done = carom_cli("install-comfyui", str(base))
    assert done.returncode == 0, done.stderr
    try:
        server.start_for_tests()
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
    keep(page, "page")


def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("CAROM_SCREENSHOTS"):
        Path(folder, f"{name}.png").write_bytes(page.screenshot())


def show(page: Page, kind: str) -> None:
    """Bring a node to the upper left, in its true size."""
    page.run(NODE + "const d = app.canvas.ds; d.scale = 1; d.offset = [60 - node.pos[0], 80 - node.pos[1]];"
             "app.canvas.setDirty(true, true); return 1;", kind)  # fmt: skip
    time.sleep(1)  # it is drawn


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
@pytest.mark.parametrize("mode", ["classic", "nodes 2.0"])
def test_a_template_opens_without_an_error(server, page, path, mode):
    use(page, mode)
    page.run(
        "return fetch('/api/workflow_templates/carom/' + arguments[0] + '.json').then(a => a.json())"
        ".then(w => app.loadGraphData(w, true, true, arguments[0])).then(() => 1)", path.stem,
    )  # fmt: skip
    page.wait("return app.graph._nodes.some(n => n.type === 'CaromReport') ? 1 : 0")
    time.sleep(2)  # dialogs come after the graph
    assert page.run("return app.graph._nodes.filter(n => n.has_errors || !n.type).map(n => n.type)") == []
    visible = (
        "[...document.querySelectorAll('[role=dialog], [role=alert]')].filter(e => e.getClientRects().length)"
    )
    assert page.run(f"return {visible}.map(e => e.innerText)") == []
    assert "missing" not in page.run("return document.body.innerText").lower()
    page.run("app.extensionManager.command.execute('Comfy.Canvas.FitView'); return 1;")
    time.sleep(1)
    keep(page, f"{path.stem} {mode}")


def use(page: Page, mode: str) -> None:
    page.run("return app.extensionManager.setting.set('Comfy.VueNodes.Enabled', arguments[0]).then(() => 1)",
             mode == "nodes 2.0")  # fmt: skip


@pytest.mark.parametrize("mode", ["classic", "nodes 2.0"])
def test_report_and_plan_read_well(server, page, mode):
    """Lists of "name: value", a line each, in both of the page's ways to draw nodes."""
    use(page, mode)
    page.run(
        "const [make, link] = [(t, x, y) => { const n = LiteGraph.createNode(t); n.pos = [x, y]; app.graph.add(n); return n; },"
        "(a, i, b, name) => a.connect(i, b, b.inputs.findIndex(s => s.name === name))];"
        "app.graph.clear(); const load = make('CaromLoadDiffusionModel', 0, 0), cond = make('CaromTestConditioning', 0, 500),"
        "latent = make('CaromTestLatent', 0, 800), sample = make('KSampler', 400, 0), report = make('CaromReport', 800, 0),"
        "plan = make('CaromPlan', 1400, 0); report.size = [460, 720]; plan.size = [460, 520];"
        "const set = (n, name, v) => { n.widgets.find(w => w.name === name).value = v; };"
        "set(load, 'unet_name', 'flux1-dev.safetensors'); set(load, 'mode', 'stream'); set(load, 'vram', '10MiB');"
        "set(cond, 'width', 768); set(cond, 'pooled', 768); set(cond, 'tokens', 8); set(latent, 'shape', '1,16,16,16');"
        "set(sample, 'steps', 3); set(sample, 'cfg', 1); set(plan, 'model_name', 'flux1-dev.safetensors');"
        "link(load, 0, sample, 'model'); link(cond, 0, sample, 'positive'); link(cond, 0, sample, 'negative');"
        "link(latent, 0, sample, 'latent_image'); link(load, 0, report, 'model'); link(sample, 0, report, 'after'); return 1;"
    )  # fmt: skip
    before = set(server.get("/history"))
    page.click('[data-testid="queue-button"], .comfy-queue-btn', "Run")
    page.wait("return fetch('/history').then(a => a.json()).then(h => Object.keys(h).length > arguments[0] ? 1 : 0)",
              len(before), seconds=300)  # fmt: skip
    (ran,) = set(server.get("/history")) - before
    status = server.get(f"/history/{ran}")[ran]["status"]
    assert status["status_str"] == "success", status
    for kind, line in (("CaromReport", "budget for weights: 10.00 MiB"), ("CaromPlan", "together:")):
        show(page, kind)
        keep(page, f"{kind} {mode}")
        shown = page.wait(
            "const all = [...document.querySelectorAll('.comfy-markdown-content, .dom-widget, [class*=overflow-y-auto]')];"
            "const found = all.find(e => e.innerText.includes(arguments[0])); return found ? found.innerText : 0;", line
        )  # fmt: skip
        (alone,) = (text for text in shown.splitlines() if line in text)
        assert len(alone) < 80, "a paragraph"
