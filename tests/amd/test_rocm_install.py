"""Installing: staged, proven, then written; undone when a step fails; idle the second time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if "rocm_trees" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "rocm_trees", Path(__file__).parent / "rocm_fakes" / "trees.py"
    )
    assert _spec and _spec.loader
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["rocm_trees"] = _module
    _spec.loader.exec_module(_module)
trees = sys.modules["rocm_trees"]
Tree, FakeRunner, Result, events, failed = (
    trees.Tree,
    trees.FakeRunner,
    trees.Result,
    trees.events,
    trees.failed,
)
FAKES = Path(__file__).parent / "rocm_fakes"


def run(tree, *argv, capsys, probe=None, pip=None):
    runner = FakeRunner(tree, probe, pip)
    code = trees.SETUP.main([*argv, "--json"], tree.host(), runner)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, json.loads(out), runner


@pytest.mark.parametrize("windows", [True, False])
def test_a_bare_amd_environment_ends_ready_and_the_second_run_is_idle(windows, tmp_path, capsys):
    tree = Tree(tmp_path / "ключ with space", windows=windows).bare()
    code, report, runner = run(tree, capsys=capsys)
    assert code == 0, report["missing"]
    assert runner.pip_verbs() == ["--version", "wheel", "download", "stage", "install"]
    assert len(report["changed"]) == 2 and report["carom_will_use"]["pool"].startswith("aimdo")
    after = tree.snapshot()
    code, report, runner = run(tree, capsys=capsys)
    assert (code, report["changed"]) == (0, [])
    assert runner.pip_verbs() == ["--version", "wheel"], "only the comparison is made"
    assert tree.snapshot() == after


def test_a_changed_checkout_is_installed_again(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    run(tree, capsys=capsys)
    (tree.root / "__init__.py").write_text("__version__ = '0.1.0'  # edited\n")
    code, report, _ = run(tree, capsys=capsys)
    assert code == 0 and report["changed"] == ["installed carom-0.1.0-py3-none-any.whl"]
    assert "edited" in (tree.site / "carom" / "__init__.py").read_text()


def test_missing_dependencies_are_installed_with_torch_pinned(tmp_path, capsys):
    tree = Tree(tmp_path)
    tree.torch()
    tree.sdk()
    code, report, runner = run(tree, capsys=capsys)
    assert code == 0, report["missing"]
    assert runner.pip_verbs() == ["--version", "wheel", "download", "stage", "install", "install"]
    assert "installed numpy>=1.24, safetensors>=0.4.3" in report["changed"]
    wanted = [a for call in runner.calls for a in call if a.startswith("torch")]
    assert wanted == [], "torch itself is never asked for"


def test_a_failed_proof_of_the_staged_copy_changes_nothing(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    before = tree.snapshot()
    probe = Result(0xC0000005, events(last="vbar"), "")
    code, report, runner = run(tree, capsys=capsys, probe=probe)
    assert report["exit_name"] == "access_violation" and report["changed"] == []
    assert "install" not in runner.pip_verbs() and tree.snapshot() == before
    probed = next(c for c in runner.calls if any(a.endswith("rocm_probe.py") for a in c))
    assert "--path" in probed, "the staged packages are what is proven"


def test_dependencies_are_taken_away_again_when_carom_cannot_be_installed(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    for path in tree.site.glob("numpy*/*"):
        path.unlink()
    for path in tree.site.glob("numpy*"):
        path.rmdir()
    runner = FakeRunner(tree)
    plain = runner._install

    def refuse(words):
        return Result(1, "", "ERROR: no") if "--force-reinstall" in words else plain(words)

    runner._install = refuse
    trees.SETUP.main(["--json"], tree.host(), runner)
    report = json.loads(capsys.readouterr().out)
    assert report["exit_name"] == "pip_failed"
    assert runner.calls[-1][-3:] == ["uninstall", "-y", "numpy"]


@pytest.mark.parametrize("windows", [True, False])
def test_fix_renames_copied_libraries_and_puts_them_back_if_the_proof_fails(windows, tmp_path, capsys):
    tree = Tree(tmp_path, windows=windows).healthy()
    hip, aimdo = ("amdhip64_7.dll", "aimdo_rocm.dll") if windows else ("libamdhip64.so.6", "aimdo_rocm.so")
    copies = [tree.site / "torch" / "lib" / hip, tree.python.with_name(aimdo)]
    for path in copies:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"copied by hand")
    before = tree.snapshot()
    wrong = Result(0, events(failed("vbar", "wrong_result")), "")
    code, report, _ = run(tree, "--fix", capsys=capsys, probe=wrong)
    assert report["exit_name"] == "wrong_result" and tree.snapshot() == before
    code, report, _ = run(tree, "--fix", capsys=capsys)
    assert code == 0, report["missing"]
    assert not any(p.exists() for p in copies) and len(report["changed"]) == 2
    assert all(p.with_name(p.name + ".carom-aside").read_bytes() == b"copied by hand" for p in copies)
    assert run(tree, "--fix", capsys=capsys)[1]["changed"] == [], "what was renamed is no copy any more"


def test_a_rocm_library_copied_into_comfy_aimdo_is_replaced_by_the_wheels(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    tree.dist("comfy_aimdo", "0.2.0", {"comfy_aimdo/control.py": b"#"})
    (tree.site / "comfy_aimdo" / "aimdo_rocm.dll").write_bytes(b"hipified by hand")
    code, report, _ = run(tree, "--check", capsys=capsys)
    assert report["exit_name"] == "stale_dlls"
    for info in tree.site.glob("comfy_aimdo-0.2.0.dist-info/*"):
        info_dir = info.parent
    code, report, runner = run(tree, "--fix", capsys=capsys)
    assert "download" in runner.pip_verbs()
    assert (tree.site / "comfy_aimdo" / "aimdo_rocm.dll").read_bytes() == b"native"
    assert info_dir.exists()  # the fake pip leaves the old record: the check after the install says so
    assert report["exit_name"] == "aimdo_damaged"


def test_dry_run_tells_every_step_and_does_none(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    copied = tree.python.with_name("amdhip64_7.dll")
    copied.write_bytes(b"x")
    before = tree.snapshot()
    code, report, runner = run(tree, "--dry-run", "--fix", "--comfyui", str(tree.comfyui), capsys=capsys)
    told = "\n".join(report["planned"])
    assert code == 0 and tree.snapshot() == before and runner.pip_verbs() == []
    for word in ("rename", "build", "comfy-aimdo>=0.6", "prove", "--force-reinstall", "custom_nodes"):
        assert word in told
    assert run(tree, "--dry-run", capsys=capsys)[1]["exit_name"] == "stale_dlls"


def test_a_given_wheel_is_installed_without_the_network(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    wheel = trees.make_wheel(
        tmp_path / "по сети", "comfy_aimdo", "0.6.0", tree.aimdo_files(), "cp39-abi3-win_amd64"
    )
    code, report, runner = run(tree, "--wheel", str(wheel), capsys=capsys)
    assert code == 0, report["missing"]
    assert "download" not in runner.pip_verbs() and "installed " + wheel.name in report["changed"]


def test_the_release_comfyui_pins_is_kept(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    (tree.comfyui / "requirements.txt").write_text("comfy-kitchen>=0.2\ncomfy-aimdo==0.4.13\n")
    _, report, _ = run(tree, "--dry-run", "--comfyui", str(tree.comfyui), capsys=capsys)
    assert "fetch comfy-aimdo==0.4.13" in report["planned"]


def test_an_index_that_gives_a_wheel_without_the_library_is_said_so(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    before = tree.snapshot()
    tree.aimdo_files = lambda: {"comfy_aimdo/control.py": b"#"}
    _, report, _ = run(tree, capsys=capsys)
    assert report["exit_name"] == "aimdo_no_library" and tree.snapshot() == before


def ai_toolkit(tree):
    folder = tree.base / "ai toolkit"
    for name in ("run.py", "toolkit/x.py", "extensions/x.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#")
    return folder


def test_ai_toolkits_extension_is_put_there_once_as_carom_itself_would(tmp_path, capsys):
    from carom.tools import ai_toolkit_folder as own

    tree = Tree(tmp_path).bare()
    toolkit = ai_toolkit(tree)
    options = ["--ai-toolkit", str(toolkit), "--python", str(tree.python)]
    _, report, _ = run(tree, "--dry-run", *options, capsys=capsys)
    assert any("extension" in line for line in report["planned"])
    code, report, _ = run(tree, *options, capsys=capsys)
    place = toolkit / "extensions" / own.NAME / "__init__.py"
    assert code == 0, report["missing"]
    assert place.read_text("utf-8") == own.TEXT, "so that `carom install-ai-toolkit --uninstall` knows it"
    assert any("extension" in line for line in report["changed"])
    code, report, _ = run(tree, *options, capsys=capsys)
    assert (code, report["changed"]) == (0, [])
    place.write_text(own.MARK + "\nold\n")
    code, report, _ = run(tree, *options, capsys=capsys)
    assert code == 0 and len(report["changed"]) == 1 and place.read_text("utf-8") == own.TEXT


def test_ai_toolkits_extension_goes_again_when_a_later_step_fails(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    toolkit = ai_toolkit(tree)
    code, report, _ = run(
        tree, "--ai-toolkit", str(toolkit), "--python", str(tree.python), capsys=capsys,
        pip={"install": Result(1, "", "ERROR: no")},
    )  # fmt: skip
    assert report["exit_name"] == "pip_failed"
    assert not (toolkit / "extensions" / "carom_offload").exists()


def test_the_node_is_linked_once(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    code, report, _ = run(tree, "--comfyui", str(tree.comfyui), capsys=capsys)
    node = tree.comfyui / "custom_nodes" / "carom"
    assert code == 0 and node.samefile(tree.root)
    code, report, _ = run(tree, "--comfyui", str(tree.comfyui), capsys=capsys)
    assert (code, report["changed"]) == (0, [])


def test_the_node_is_copied_where_links_are_refused_and_follows_the_checkout(tmp_path, capsys, monkeypatch):
    tree = Tree(tmp_path).bare()
    (tree.root / ".git").mkdir()
    (tree.root / ".git" / "HEAD").write_text("x")

    def refuse(*a, **k):
        raise OSError("privilege not held")

    monkeypatch.setattr(os, "symlink", refuse)
    if sys.platform == "win32":
        import _winapi

        monkeypatch.setattr(_winapi, "CreateJunction", refuse)
    code, report, _ = run(tree, "--comfyui", str(tree.comfyui), capsys=capsys)
    node = tree.comfyui / "custom_nodes" / "carom"
    assert code == 0 and not node.is_symlink() and not (node / ".git").exists()
    assert run(tree, "--comfyui", str(tree.comfyui), capsys=capsys)[1]["changed"] == []
    (tree.root / "__init__.py").write_text("__version__ = '0.1.0'  # edited\n")
    report = run(tree, "--comfyui", str(tree.comfyui), capsys=capsys)[1]
    assert any("copied" in c for c in report["changed"])
    assert "edited" in (node / "__init__.py").read_text()
    assert sorted(p.name for p in node.parent.iterdir()) == ["carom"]


def test_the_node_is_taken_away_again_when_pip_fails(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    before = tree.snapshot()
    pip = {"install": Result(1, "", "ERROR: externally-managed-environment")}
    code, report, _ = run(tree, "--comfyui", str(tree.comfyui), capsys=capsys, pip=pip)
    assert report["exit_name"] == "pip_failed"
    assert tree.snapshot() == before and not (tree.comfyui / "custom_nodes" / "carom").exists()


def test_text_output_names_what_is_missing_and_what_will_be_used(tmp_path, capsys):
    tree = Tree(tmp_path).bare()
    assert trees.SETUP.main(["--check"], tree.host(), FakeRunner(tree)) == 20
    out = capsys.readouterr().out
    assert "comfy-aimdo is not installed" in out and "exit code 20" in out and "Nothing was changed." in out
    assert trees.SETUP.main([], tree.host(), FakeRunner(tree)) == 0
    out = capsys.readouterr().out
    assert "READY (exit code 0" in out and "pinned_cap    12.8 GiB" in out and "gfx1201" in out


# ---- the real thing: a real venv, real pip, a real wheel, the real probe over a stand-in torch ----


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """A venv whose torch is a few lines, with this environment's pip and packages behind it."""
    if sys.platform == "win32":
        pytest.skip("lays out a POSIX venv; the logic under it is the same")
    base = tmp_path_factory.mktemp("real ü")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(base / "venv")], check=True, timeout=120
    )
    site = next((base / "venv").glob("lib/python3*/site-packages"))
    tree = Tree.__new__(Tree)
    tree.site, tree.base, tree.windows = site, base, False
    torch = {
        f"torch/{n}.py": (FAKES / f"torch_{n.strip('_')}.py").read_bytes() for n in ("__init__", "cuda", "nn")
    }
    torch["torch/version.py"] = b"__version__ = '2.12.0+rocm7.14.0'\nhip = '7.14.60850'\ncuda = None\n"
    tree.dist("torch", "2.12.0+rocm7.14.0", torch)
    tree.dist("rocm_sdk_core", "7.14.0", {"_rocm_sdk_core/lib/libamdhip64.so.7": b"not really" * 500})
    behind = [p for p in sys.path if p.endswith("site-packages")]
    (site / "behind.pth").write_text("\n".join(behind) + "\n", "utf-8")
    tree.python = base / "venv" / "bin" / "python"
    tree.root = base / "checkout"
    tree.root.mkdir()
    (tree.root / "__init__.py").write_bytes((FAKES / "carom_init.py").read_bytes())
    (tree.root / "requirements.txt").write_text("numpy>=1.24\n")
    (tree.root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=68"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "carom"\nversion = "0.1.0"\n'
        '[tool.setuptools]\npackages = ["carom"]\npackage-dir = { "carom" = "." }\n'
    )
    tree.dev = base
    (base / "kfd").write_bytes(b"")
    files = {
        "comfy_aimdo/__init__.py": b"",
        "comfy_aimdo/aimdo_rocm.so": b"native",
        **{
            f"comfy_aimdo/{n}.py": (FAKES / f"aimdo_{n}.py").read_bytes()
            for n in ("control", "model_vbar", "torch")
        },
    }
    tree.wheel = trees.make_wheel(base, "comfy_aimdo", "0.6.0", files)
    return tree


def real(tree, *argv, capsys, timeout="60"):
    host = trees.HOST.Host("Linux", "x86_64", tree.root, tree.python, tree.base, ram=32 << 30, dev=tree.dev)
    options = [*argv, "--python", str(tree.python), "--timeout", timeout, "--json"]
    code = trees.SETUP.main(options, host, trees.HOST.Runner())
    return code, json.loads(capsys.readouterr().out)


def test_real_pip_and_probe_install_and_prove_and_then_rest(venv, capsys):
    before = {str(p) for p in venv.base.rglob("*")}
    code, report = real(venv, "--check", capsys=capsys)
    assert report["exit_name"] == "no_aimdo", report["missing"]
    assert report["carom_will_use"]["pool"].startswith("torch")
    assert {str(p) for p in venv.base.rglob("*")} == before, "looking leaves nothing, not even bytecode"
    code, report = real(venv, "--wheel", str(venv.wheel), capsys=capsys)
    assert code == 0, report["missing"]
    assert report["carom_will_use"]["streaming"] == "proven bit-exact"
    assert report["carom_will_use"]["device"] == "AMD Radeon RX 9070 XT"
    assert (venv.site / "carom" / "__init__.py").is_file()
    assert not (venv.root / "build").exists() and not list(venv.root.glob("*.egg-info"))
    code, report = real(venv, capsys=capsys)
    assert (code, report["changed"]) == (0, []), "safe to run twice"


@pytest.mark.parametrize(
    ("fake", "name", "step"),
    [
        ("init_false", "init_false", "aimdo_init"),
        ("device_false", "device_false", "aimdo_device"),
        ("crash", "access_violation", "aimdo_device"),
        ("access_violation", "access_violation", "aimdo_device"),
        ("exit", "probe_failed", "aimdo_device"),
        ("no_gpu", "no_gpu", "gpu"),
        ("error", "probe_failed", "pinned"),
        ("wrong_tensor", "wrong_result", "tensor"),
        ("wrong_pinned", "wrong_result", "pinned"),
        ("wrong_stream", "wrong_result", "stream"),
        ("no_stream", "no_carom", "carom"),
        ("budget", "ready", ""),
        ("wrong_vbar", "wrong_result", "vbar"),
        ("offloaded", "wrong_result", "vbar"),
        ("no_space", "address_space", "address_space"),
        ("little_space", "ready", ""),
        ("space_crash", "address_space", "address_space"),
        ("hang", "hang", "torch"),
    ],
)
def test_the_real_probe_tells_each_failure_apart(fake, name, step, venv, capsys, monkeypatch):
    if not (venv.site / "comfy_aimdo").is_dir():
        assert real(venv, "--wheel", str(venv.wheel), capsys=capsys)[0] == 0
    monkeypatch.setenv("CAROM_FAKE", fake)
    code, report = real(venv, "--check", capsys=capsys, timeout="2" if fake == "hang" else "60")
    assert report["exit_name"] == name, report["missing"]
    if step:
        assert next(f for f in report["findings"] if f["level"] == "bad")["check"] == "proof: " + step


def test_the_real_probe_sees_two_hip_runtimes_in_one_process(venv, capsys, monkeypatch):
    if not (venv.site / "comfy_aimdo").is_dir():
        assert real(venv, "--wheel", str(venv.wheel), capsys=capsys)[0] == 0
    other = venv.site / "elsewhere" / "old" / "libamdhip64.so.6"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"another one" * 500)
    monkeypatch.setenv("CAROM_FAKE", "two_runtimes")
    assert real(venv, "--check", capsys=capsys)[1]["exit_name"] == "wrong_runtime"
