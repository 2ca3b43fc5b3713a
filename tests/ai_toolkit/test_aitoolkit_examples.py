"""The example configs: what their generator writes today, readable by Carom, budgets that the card has."""

from __future__ import annotations

import importlib.util

import pytest
from carom.core.common.sizes import parse_size
from carom.toolkit_ext import options

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def folder(root):
    return root / "docs" / "ai-toolkit-examples"


def test_every_example_states_what_carom_plan_says_today(folder):
    spec = importlib.util.spec_from_file_location("write_examples", folder / "write.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    written = module.examples()
    assert len(written) == 20
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")} == written


def test_every_example_is_a_job_that_carom_takes(folder):
    for path in folder.glob("*.yaml"):
        job = yaml.safe_load(path.read_text(encoding="utf-8"))
        (process,) = job["config"]["process"]
        policy = options.read(process["model"])
        assert policy is not None and policy.mode == "bouncing" and not policy.remarks, path
        card = int(path.stem.rpartition("-")[2].removesuffix("gb")) * 10**9
        assert 0 < parse_size(policy.vram) < card, path


def test_the_line_for_disk_works_when_its_comment_sign_is_removed(folder):
    for path in folder.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        (process,) = yaml.safe_load(text.replace("# disk: ", "disk: "))["config"]["process"]
        policy = options.read(process["model"])
        assert policy is not None and policy.disk and policy.disk.endswith("carom"), path
