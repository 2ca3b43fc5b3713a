"""Reading of ai-toolkit jobs: ai-toolkit's defaults, old spellings, and files that are no jobs."""

from __future__ import annotations

import copy
import sys

import pytest
from carom.core.common.errors import UnsupportedError
from carom.tools.planner.job_file import MAX_JOB, is_job, parse_job, read_job
from carom.tools.planner.job_quant import quant_of

JOB = {
    "job": "extension",
    "config": {
        "name": "fox",
        "process": [
            {
                "type": "sd_trainer",
                "network": {"type": "lora", "linear": 32},
                "datasets": [{"folder_path": "/x", "resolution": [1024, 512]}],
                "train": {"batch_size": 2, "dtype": "bf16", "cache_text_embeddings": True},
                "model": {"name_or_path": "a/b", "arch": "flux2", "quantize": True, "qtype": "uint3|some/adapter.safetensors"},
            }
        ],
    },
}  # fmt: skip


def process(section: str = "", **changes):
    """Return the process of JOB with `changes` of one of its sections ("": of the process itself)."""
    job = copy.deepcopy(JOB)
    entry = job["config"]["process"][0]
    (entry[section] if section else entry).update(changes)
    return parse_job(job, "job.yaml").processes[0]


def test_what_decides_memory_and_time_is_read():
    found = process()
    assert (found.number, found.type, found.batch, found.rank, found.network) == (
        1, "sd_trainer", 2, 32, "lora",
    )  # fmt: skip
    assert found.datasets[0].resolutions == (512, 1024) and found.datasets[0].frames == 1
    assert (found.model.qtype, found.model.qtype_te) == ("uint3", "qfloat8")
    assert found.caches_text and found.checkpointing and not found.trains_text_encoder
    assert found.model.offload.mode is None


def test_absent_settings_have_ai_toolkits_defaults():
    found = process(train=None, datasets=None, network=None, model={"name_or_path": "a/b"})
    assert (found.batch, found.dtype, found.checkpointing, found.caches_text) == (1, "fp32", True, False)
    assert found.datasets[0].resolutions == (512,) and found.network is None
    assert (found.model.arch, found.model.qtype, found.model.qtype_te) == ("sd1", None, None)
    assert process("network", type="lora", linear=None).rank == 4


@pytest.mark.parametrize("model, arch", [
    ({"arch": "zimage:turbo"}, "zimage"), ({"is_flux": True}, "flux"), ({"is_xl": True}, "sdxl"),
    ({"arch": "flex1"}, "flux"), ({}, "sd1"),
])  # fmt: skip
def test_every_way_to_name_an_architecture(model, arch):
    assert process(model={"name_or_path": "a/b", **model}).model.arch == arch


def test_text_encoders_are_quantised_as_the_transformer_unless_the_job_says_otherwise():
    assert process("model", quantize_te=False).model.qtype_te is None
    assert process("model", quantize=False).model.qtype_te is None
    assert process("model", quantize=False, quantize_te=True, qtype_te="float8").model.qtype_te == "float8"


def test_the_jobs_own_offload_settings_are_read():
    own = process("model", offload="bouncing", offload_kwargs={"vram": "12GiB", "codec": "raw"}).model.offload
    assert (own.mode, own.vram, own.codec) == ("bouncing", "12GiB", "raw")
    assert process("model", offload=False).model.offload.mode is None  # YAML reads a bare `off` as false
    with pytest.raises(ValueError, match="bouncing, aimdo, auto or off"):
        process("model", offload="bounce")


def test_control_images_are_counted():
    datasets = [{"control_path": ["/a", "/b"]}, {"control_path_1": "/a"}]
    assert [data.controls for data in process(datasets=datasets).datasets] == [2, 1]


@pytest.mark.parametrize("section, changes, named", [
    ("train", {"batch_size": 0}, r"process\[0\].train.batch_size=0"), ("train", {"batch_size": "4"}, "batch_size='4'"),
    ("network", {"linear": -1}, "network.linear"), ("", {"train": [1]}, "train=list"), ("", {"datasets": {}}, None),
    ("", {"datasets": [{"resolution": "big"}]}, r"datasets\[0\].resolution"), ("", {"datasets": [3]}, r"datasets\[0\]"),
    ("", {"datasets": [{"resolution": []}]}, "resolution"), ("model", {"name_or_path": ""}, "name_or_path"),
    ("model", {"offload": "bouncing", "offload_kwargs": {"vram": [1]}}, "offload_kwargs.vram"),
])  # fmt: skip
def test_a_bad_value_is_named(section, changes, named):
    if named is None:
        assert process(section, **changes).datasets  # an empty section is as none
        return
    with pytest.raises(ValueError, match=named):
        process(section, **changes)


@pytest.mark.parametrize("data, said", [
    (None, "no ai-toolkit job"), ([1], "no ai-toolkit job"), ({"job": "extension"}, "no ai-toolkit job"),
    ({"job": "generate", "config": {}}, "loads no extensions"), ({"job": "extension", "config": {}}, "config.process"),
    ({"job": "extension", "config": {"process": []}}, "config.process"),
    ({"job": "extension", "config": {"process": ["x"]}}, "not a section"),
])  # fmt: skip
def test_data_that_is_no_job_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        parse_job(data, "job.yaml")


@pytest.mark.parametrize("text, said", [
    ("a: [1", "not YAML"), ("!!python/object/apply:os.getcwd []", "not YAML"), ("[" * 5000, "nested too deeply|not YAML"),
    ("a: &a {b: 1}\nc: {<<: *a}", "merge keys"), ("x: " + "y" * MAX_JOB, "larger than 256 KiB"), ("\x00", "not YAML"),
])  # fmt: skip
def test_a_hostile_file_is_refused(tmp_path, text, said):
    pytest.importorskip("yaml")
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_job(str(path))


def test_aliases_that_stand_for_much_are_never_printed(tmp_path):
    pytest.importorskip("yaml")
    lists = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
    path = tmp_path / "job.yaml"
    path.write_text(f"a0: &a0 [x]\n{lists}\njob: *a11\nconfig: {{}}\n")
    with pytest.raises(ValueError, match="job: list") as error:
        read_job(str(path))
    assert len(str(error.value)) < 1000


def test_a_file_that_is_not_there_is_bad_use(tmp_path):
    with pytest.raises(ValueError, match="not there"):
        read_job(str(tmp_path / "gone.yaml"))


def test_without_pyyaml_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text("job: extension")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UnsupportedError, match=r"pip install pyyaml"):
        read_job(str(tmp_path / "job.yaml"))


def test_a_job_is_known_by_its_ending():
    assert is_job("a/b.yaml") and is_job("C.YML") and not is_job("flux2-dev") and not is_job("m.safetensors")


@pytest.mark.parametrize("qtype, bits", [("qfloat8", 8), ("convrot8", 8), ("uint4", 4.375), ("uint8", 16)])
def test_quantised_formats_have_the_bits_that_ai_toolkit_stores(qtype, bits):
    quant, known = quant_of(qtype, "bf16")
    assert known and quant.dense == quant.experts == bits and quant.name == qtype


def test_an_unknown_format_is_counted_in_the_jobs_own():
    quant, known = quant_of("mystery3", "fp32")
    assert not known and quant.dense == 32
    assert quant_of(None, "bf16")[0].is_16bit
