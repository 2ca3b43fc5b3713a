"""scripts/rocm_setup.py over fake environment trees: every exit code, and nothing changed by looking."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "rocm_trees", Path(__file__).parent / "rocm_fakes" / "trees.py"
)
assert _spec and _spec.loader
trees = importlib.util.module_from_spec(_spec)
sys.modules["rocm_trees"] = trees
_spec.loader.exec_module(trees)
Tree, FakeRunner, Result, events, failed = (
    trees.Tree,
    trees.FakeRunner,
    trees.Result,
    trees.events,
    trees.failed,
)
EXITS = trees.FINDINGS.EXITS


def run(tree, *argv, probe=None, pip=None, capsys=None):
    """(exit code, JSON report, runner) of one run of main over a tree."""
    runner = FakeRunner(tree, probe, pip)
    code = trees.SETUP.main([*argv, "--json"], tree.host(), runner)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    report = json.loads(out)
    assert report["exit_code"] == code
    return code, report, runner


# Exit name -> what to do to a healthy Windows tree, and options, probe and pip's answers for the run.
def _torch(**how):
    def change(tree):
        (tree.site / "torch" / "version.py").unlink()
        for info in tree.site.glob("torch-*.dist-info/*"):
            info.unlink()
        tree.torch(**how)

    return change


def _remove(*patterns):
    def change(tree):
        for pattern in patterns:
            for path in [p for p in tree.site.glob(pattern) if p.is_file()]:
                path.unlink()
            for path in [p for p in tree.site.glob(pattern) if p.is_dir()]:
                path.rename(tree.base / ("gone-" + path.name))

    return change


def _file(where, data=b"x"):
    def change(tree):
        path = tree.base / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return change


def _set(**values):
    return lambda tree: tree.__dict__.update(values)


def _facts(**values):
    return lambda tree: tree.host_facts.update(values)


def _own_library_missing(tree):
    _remove("comfy_aimdo*")(tree)
    tree.dist("comfy_aimdo", "0.2.0", {"comfy_aimdo/control.py": b"#"})


def _no_disk(tree):
    host = tree.host
    tree.host = lambda: type("Full", (type(host()),), {"free_disk": lambda self, path: 5 << 20})(
        **vars(host())
    )


SITE = "ComfyUI/venv/Lib/site-packages/"
NEW_CONNECTION = "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found for numpy"
DLL = SITE + "torch/lib/amdhip64_7.dll"
CHECK = ["--check"]
TOOLKIT = ("run.py", "toolkit/x.py", "extensions/x.py")
CASES = [
    ("ready", "healthy", None, CHECK, None, None),
    ("ready", "install twice over is idle", None, [], None, None),
    ("no_python", "no venv", lambda t: t.python.unlink(), [*CHECK, "--comfyui", "ComfyUI"], None, None),
    ("no_python", "--python names nothing", None, [*CHECK, "--python", "absent.exe"], None, None),
    ("no_python", "it does not start", lambda t: t.python.rename(t.python.with_name("python.exe")) and _facts(running=t.base / "x.exe")(t), [*CHECK, "--python", "ComfyUI/main.py"], None, None),
    ("platform", "Python 3.9", _set(version=[3, 9, 1]), CHECK, None, None),
    ("platform", "32 bit Python", _set(bits=32), CHECK, None, None),
    ("platform", "ARM", _set(machine="ARM64"), CHECK, None, None),
    ("platform", "old Windows", _facts(build=17763), CHECK, None, None),
    ("platform", "macOS", _facts(system="Darwin"), [*CHECK, "--python", "{python}"], None, None),
    ("no_torch", "none", _remove("torch*"), CHECK, None, None),
    ("no_torch", "version.py cut off", _file(SITE + "torch/version.py", b"__version__ = '2."), CHECK, None, None),
    ("torch_cpu", "CPU torch", _torch(version="2.12.0+cpu", hip=None), CHECK, None, None),
    ("torch_cuda", "CUDA torch", _torch(version="2.12.0+cu130", hip=None, cuda="13.0"), CHECK, None, None),
    ("torch_old", "torch 2.7", _torch(version="2.7.1+rocm7.14.0"), CHECK, None, None),
    ("torch_old", "ROCm 6", _torch(version="2.8.0", hip="6.4.43482"), CHECK, None, None),
    ("no_sdk", "no HIP runtime", _remove("_rocm_sdk_core/bin/*"), CHECK, None, None),
    ("no_space", "disk full", _no_disk, CHECK, None, None),
    ("no_aimdo", "none", _remove("comfy_aimdo*"), CHECK, None, None),
    ("aimdo_no_library", "wheel without the DLL", _own_library_missing, CHECK, None, None),
    ("aimdo_damaged", "DLL altered", _file(SITE + "comfy_aimdo/aimdo_rocm.dll", b"other"), CHECK, None, None),
    ("aimdo_damaged", "DLL taken by a scanner", _remove("comfy_aimdo/aimdo_rocm.dll"), CHECK, None, None),
    ("aimdo_damaged", "two records", lambda t: t.dist("comfy_aimdo", "0.4.0", t.aimdo_files()), CHECK, None, None),
    ("stale_dlls", "copied beside torch", _file(DLL), CHECK, None, None),
    ("stale_dlls", "copied beside python", _file("ComfyUI/venv/Scripts/amdhip64_7.dll"), CHECK, None, None),
    ("stale_dlls", "copied into ComfyUI", _file("ComfyUI/aimdo.dll"), [*CHECK, "--comfyui", "ComfyUI"], None, None),
    ("stale_dlls", "install without --fix", _file(DLL), [], None, None),
    ("no_carom", "none", _remove("carom*"), CHECK, None, None),
    ("no_carom", "damaged", _file(SITE + "carom/__init__.py"), CHECK, None, None),
    ("no_carom", "not in ComfyUI", None, [*CHECK, "--comfyui", "ComfyUI"], None, None),
    ("bad_folder", "not ComfyUI", None, [*CHECK, "--comfyui", "checkout", "--python", "{python}"], None, None),
    ("bad_folder", "another carom", _file("ComfyUI/custom_nodes/carom/x.py"), ["--comfyui", "ComfyUI"], None, None),
    ("bad_folder", "not ai-toolkit", None, [*CHECK, "--ai-toolkit", "ComfyUI"], None, None),
    ("no_extension", "ai-toolkit", lambda t: [_file(f"ComfyUI/{n}")(t) for n in TOOLKIT], [*CHECK, "--ai-toolkit", "ComfyUI"], None, None),
    ("bad_folder", "another extension", lambda t: [_file(f"ComfyUI/{n}")(t) for n in (*TOOLKIT, "extensions/carom_offload/__init__.py")], [*CHECK, "--ai-toolkit", "ComfyUI"], None, None),
    ("bad_wheel", "absent", None, [*CHECK, "--wheel", "comfy_aimdo-0.6.0-cp39-abi3-win_amd64.whl"], None, None),
    ("bad_wheel", "no zip", _file("comfy_aimdo-0.6.0-cp39-abi3-win_amd64.whl"), [*CHECK, "--wheel", "comfy_aimdo-0.6.0-cp39-abi3-win_amd64.whl"], None, None),
    ("bad_wheel", "without the DLL", lambda t: trees.make_wheel(t.base, "comfy_aimdo", "0.6.0", {"comfy_aimdo/aimdo_rocm.so": b""}), [*CHECK, "--wheel", "comfy_aimdo-0.6.0-py3-none-any.whl"], None, None),
    ("pip_failed", "no pip", _remove("carom*"), [], None, {"--version": Result(1, "", "No module named pip")}),
    ("pip_failed", "install fails", _remove("carom*"), [], None, {"install": Result(1, "", "ERROR: [WinError 5] Access is denied")}),
    ("pip_failed", "staging fails", _remove("carom*"), [], None, {"stage": Result(2, "", "ERROR: odd")}),
    ("offline", "aimdo cannot be fetched", _remove("comfy_aimdo*"), [], None, {"download": Result(1, "", NEW_CONNECTION)}),
    ("offline", "numpy cannot be fetched", _remove("numpy*"), [], None, {"stage": Result(1, "", NEW_CONNECTION)}),
    ("build_failed", "setup error", _remove("carom*"), [], None, {"wheel": Result(1, "", "ERROR: Failed building wheel")}),
    ("build_failed", "no checkout", lambda t: (t.root / "pyproject.toml").unlink(), [], None, None),
    ("init_false", "library", None, CHECK, Result(0, events(failed("aimdo_init", "init_false")), ""), None),
    ("device_false", "hooks refused", None, CHECK, Result(0, events(failed("aimdo_device", "device_false")), ""), None),
    ("access_violation", "0xC0000005", None, CHECK, Result(0xC0000005, events(last="aimdo_device"), ""), None),
    ("access_violation", "as a signed status", None, CHECK, Result(-1073741819, events(last="torch"), ""), None),
    ("access_violation", "SIGSEGV", None, CHECK, Result(-11, events(last="vbar"), ""), None),
    ("access_violation", "stack overrun", None, CHECK, Result(0xC0000409, events(last="vbar"), ""), None),
    ("wrong_runtime", "System32's", None, CHECK, Result(0, events({"step": "hip_runtime", "state": "ok", "loaded": ["C:\\Windows\\System32\\amdhip64_7.dll"]}), ""), None),
    ("wrong_runtime", "two HIP runtimes", None, CHECK, Result(0, events({"step": "hip_runtime", "state": "ok", "loaded": ["C:\\a\\amdhip64_7.dll", "C:\\Windows\\System32\\amdhip64_7.dll"]}), ""), None),
    ("hang", "driver call", None, CHECK, Result(None, events(last="aimdo_device"), "", timed_out=True), None),
    ("hang", "before the first line", None, CHECK, Result(None, "", "", timed_out=True), None),
    ("wrong_result", "stream", None, CHECK, Result(0, events(failed("stream", "wrong_result")), ""), None),
    ("no_gpu", "no driver", None, CHECK, Result(1, events(failed("gpu", "no_gpu")), ""), None),
    ("probe_failed", "an exception", None, CHECK, Result(0, events(failed("pinned", "probe_failed")), ""), None),
    ("probe_failed", "ends without a word", None, CHECK, Result(1, "", "ImportError: DLL load failed"), None),
    ("probe_failed", "leaves a step by exit", None, CHECK, Result(3, events(last="pinned"), ""), None),
    ("probe_failed", "unknown kind", None, CHECK, Result(0, events(failed("pinned", "no such kind")), ""), None),
    ("address_space", "none", None, CHECK, Result(0, events(failed("address_space", "address_space")), ""), None),
    ("address_space", "crash while reserving", None, CHECK, Result(0xC0000005, events(last="address_space"), ""), None),
]  # fmt: skip
ELSEWHERE = {"driver", "bad_use", "internal", "interrupted"}  # tests of their own below


@pytest.mark.parametrize(
    ("name", "case", "change", "argv", "probe", "pip"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_each_case_ends_with_its_exit_code_and_changes_nothing(
    name, case, change, argv, probe, pip, tmp_path, capsys, monkeypatch
):
    tree = Tree(tmp_path).healthy()
    if change:
        change(tree)
    monkeypatch.chdir(tmp_path)
    before = tree.snapshot()
    argv = [a.replace("{python}", str(tree.python)) for a in argv]
    code, report, _ = run(tree, *argv, probe=probe, pip=pip, capsys=capsys)
    assert (code, report["exit_name"]) == (EXITS[name].code, name), report["missing"]
    assert tree.snapshot() == before
    assert report["changed"] == []
    if name != "ready":
        first = next(f for f in report["findings"] if f["level"] == "bad")
        assert first["what"] == report["missing"][0] and len(first["what"]) > 10
        if name not in ("probe_failed", "pip_failed", "build_failed"):
            assert first["remedy"]


def test_the_cases_cover_every_exit_code():
    assert {c[0] for c in CASES} | ELSEWHERE == set(EXITS)
    codes = [e.code for e in EXITS.values()]
    assert len(set(codes)) == len(codes)


def test_every_exit_code_is_documented_in_help_and_page(root):
    text = trees.SETUP.build_parser().format_help()
    page = (root / "docs" / "amd.md").read_text("utf-8")
    for name, entry in EXITS.items():
        assert f"{entry.code:3}  {name}" in text
        assert f"| {entry.code} | `{name}` | {entry.meaning} |" in page


@pytest.mark.parametrize("broken", ["absent", "unreadable"])
def test_linux_without_the_compute_device_names_the_driver(broken, tmp_path, capsys, monkeypatch):
    tree = Tree(tmp_path, windows=False).healthy()
    code, report, _ = run(tree, "--check", capsys=capsys)
    assert code == 0, report["missing"]
    if broken == "absent":
        (tree.dev / "kfd").unlink()
    else:
        monkeypatch.setattr(os, "access", lambda *a: False)
    code, report, _ = run(tree, "--check", capsys=capsys)
    assert code == EXITS["driver"].code and "kfd" in report["missing"][0]


@pytest.mark.parametrize(
    "argv", [["--check", "--dry-run"], ["--nonsense"], ["--timeout", "0"], ["--timeout", "nan"]]
)
def test_bad_use_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        trees.SETUP.main(argv)
    assert stop.value.code == EXITS["bad_use"].code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "name"), [(RuntimeError("odd \udcff"), "internal"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_unforeseen_error_is_a_line_and_never_a_traceback(error, name, tmp_path, capsys):
    tree = Tree(tmp_path).healthy()
    runner = FakeRunner(tree)

    def fail(*a, **k):
        raise error

    runner.run = fail
    assert trees.SETUP.main(["--check"], tree.host(), runner) == EXITS[name].code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err and len(out + err) > 20


@pytest.mark.parametrize("kind", ["venv", "portable"])
@pytest.mark.parametrize("folder", ["plain", "with spaces (x86) & co", "имя-日本-ü"])
def test_environments_are_found_wherever_they_lie(kind, folder, tmp_path, capsys):
    tree = Tree(tmp_path / folder, kind).healthy()
    code, report, _ = run(
        tree, "--check", "--comfyui", str(tree.base if kind == "portable" else tree.comfyui), capsys=capsys
    )
    assert report["python"]["executable"] == str(tree.python)
    assert report["python"]["portable"] is (kind == "portable")
    assert report["exit_name"] == "no_carom", "only the node is missing"


def test_a_portable_folder_holding_the_checkout_as_node_is_found_without_options(tmp_path, capsys):
    tree = Tree(tmp_path, "portable").healthy()
    inside = tree.comfyui / "custom_nodes" / "carom-main"
    tree.root.rename(inside)
    tree.root = inside
    tree.host_facts["cwd"] = inside / "scripts"
    code, report, _ = run(tree, "--check", "--comfyui", str(tree.comfyui), capsys=capsys)
    assert code == 0, report["missing"]
    code, report, _ = run(tree, "--check", capsys=capsys)
    assert report["python"]["executable"] == str(tree.python)


def test_an_active_venv_goes_before_neighbours_and_conda_after_them(tmp_path, capsys):
    tree, other = Tree(tmp_path / "a").healthy(), Tree(tmp_path / "b").healthy()
    tree.host_facts["env"] = {"CONDA_PREFIX": str(other.prefix)}
    assert run(tree, "--check", capsys=capsys)[1]["python"]["executable"] == str(tree.python)
    tree.host_facts.update(env={"VIRTUAL_ENV": str(tree.prefix)}, cwd=other.comfyui, root=other.root)
    assert run(tree, "--check", capsys=capsys)[1]["python"]["executable"] == str(tree.python)


def test_torch_is_read_and_never_run(tmp_path, capsys):
    tree = Tree(tmp_path).healthy()
    evil = "import os\nos.abort()\n__version__ = '2.12.0+rocm7.14.0'\nhip = '7.14'\n"
    (tree.site / "torch" / "version.py").write_text(evil)
    assert run(tree, "--check", capsys=capsys)[0] == 0
    (tree.site / "torch" / "version.py").write_text("(" * 50000)
    assert run(tree, "--check", capsys=capsys)[1]["exit_name"] == "no_torch"


def test_a_nightly_that_leaves_hip_unset_still_counts_as_amd(tmp_path, capsys):
    tree = Tree(tmp_path).healthy()
    _torch(version="2.13.0a0+rocm7.15.0a20260701", hip=None)(tree)
    report = run(tree, "--check", capsys=capsys)[1]
    assert report["exit_name"] == "ready"
    assert any("rocm-sdk-core is 7.14.0" in f["what"] for f in report["findings"]), (
        "mismatched SDK is warned of"
    )


def test_warnings_do_not_change_the_exit_code(tmp_path, capsys):
    tree = Tree(tmp_path).healthy()
    system32 = tmp_path / "Windows" / "System32"
    system32.mkdir(parents=True)
    (system32 / "amdhip64_7.dll").write_bytes(b"driver's")
    tree.host_facts["env"] = {
        "SystemRoot": str(tmp_path / "Windows"),
        "PYTORCH_ALLOC_CONF": "expandable_segments: True",
        "HIP_VISIBLE_DEVICES": "-1",
    }
    code, report, _ = run(tree, "--check", capsys=capsys)
    warned = " ".join(f["what"] for f in report["findings"] if f["level"] == "warn")
    assert code == 0
    for word in ("System32", "expandable_segments", "HIP_VISIBLE_DEVICES"):
        assert word in warned


def test_check_on_this_machine_prints_json_and_changes_nothing(root, tmp_path):
    script = root / "scripts" / "rocm_setup.py"
    before = {p: p.stat().st_mtime_ns for p in (root / "scripts").rglob("*")}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-I", str(script), "--check", "--json", "--python", sys.executable],
        capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"]
    assert report["ok"] is (report["exit_code"] == 0)
    assert bool(report["missing"]) is not report["ok"]
    assert {p: p.stat().st_mtime_ns for p in (root / "scripts").rglob("*")} == before
    assert list(tmp_path.iterdir()) == []


def test_examine_gives_doctor_the_same_report(tmp_path):
    report = trees.SETUP.examine(sys.executable, prove=False)
    assert {"ok", "exit_code", "findings", "missing", "carom_will_use"} <= report.keys()
    assert report["python"] == {} or report["python"]["executable"] == sys.executable
    assert any(f["check"] == "torch" for f in report["findings"])


OWN = {
    "rocm_setup",
    "rocm_run",
    "rocm_findings",
    "rocm_host",
    "rocm_env",
    "rocm_checks",
    "rocm_packages",
    "rocm_proof",
    "rocm_install",
    "rocm_wheels",
}


def test_the_scripts_need_the_standard_library_alone_and_old_python_reads_them(root):
    for path in (root / "scripts").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"), feature_version=(3, 8))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names | OWN, f"{path.name}: {name}"


def test_an_ancient_python_gets_a_sentence(root, monkeypatch):
    """No such Python is at hand everywhere; the file's own words are run as one."""
    source = (root / "scripts" / "rocm_setup.py").read_text("utf-8")
    for modern in ('f"', "->", "from __future__", "nonlocal", ": str"):
        assert modern not in source, "Python 2 must be able to parse this file"
    monkeypatch.setattr(sys, "version_info", (2, 7, 18))
    monkeypatch.setattr(sys, "argv", ["rocm_setup.py", "--json"])
    printed: list[str] = []
    with pytest.raises(SystemExit) as stop:
        exec(
            source,
            {
                "__file__": str(root / "scripts" / "rocm_setup.py"),
                "__name__": "__main__",
                "print": printed.append,
            },
        )
    assert stop.value.code == EXITS["platform"].code
    assert json.loads(printed[0])["exit_code"] == stop.value.code
