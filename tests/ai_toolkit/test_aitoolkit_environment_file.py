"""docs/amd.md says where `OCL_SET_SVM_SIZE` has to be set for ai-toolkit: this is true of a real ai-toolkit.

HIP reads its environment when torch is first asked for a device. AI_TOOLKIT_PATH names the checkout, which is only read.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("AI_TOOLKIT_PATH", "")
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="AI_TOOLKIT_PATH is not set: no ai-toolkit to test against"
)


def first_line(tree: ast.Module, matches) -> int:
    """The line of the first statement of the module itself, not of a function, that holds a match."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            continue
        if any(matches(node) for node in ast.walk(statement)):
            return statement.lineno
    raise AssertionError("run.py has no such statement: read it again, and docs/amd.md with it")


def calls(name: str):
    return lambda node: isinstance(node, ast.Call) and getattr(node.func, "id", "") == name


def imports(name: str):
    return lambda node: isinstance(node, ast.Import) and any(alias.name == name for alias in node.names)


@pytest.fixture(scope="module")
def tree() -> ast.Module:
    return ast.parse((Path(CHECKOUT) / "run.py").read_text("utf-8"))


def test_the_file_env_is_read_before_torch_is_imported(tree):
    assert first_line(tree, calls("load_dotenv")) < first_line(tree, imports("torch"))


def test_devices_are_asked_for_before_a_job_imports_extensions(tree):
    """`get_accelerator` makes accelerate's Accelerator, which asks torch; `main` makes the jobs, which import extensions."""
    assert first_line(tree, calls("get_accelerator")) < first_line(tree, calls("main"))
    loader = ast.parse((Path(CHECKOUT) / "jobs" / "ExtensionJob.py").read_text("utf-8"))
    job = next(node for node in loader.body if isinstance(node, ast.ClassDef))
    assert any(calls("get_all_extensions_process_dict")(node) for node in ast.walk(job))
