"""Law 9 and the Parameter contract: what a streamed module is while attached, and that detaching restores it."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
from tests_harness import EVERYWHERE, on_every_device, on_some_devices, place, streamed
from tests_inside import inside
from tests_pairwise import each, pairwise
from torch import nn

LATE = carom.SimulatedDevice(seed=3)
CASE = models.CASES["stack"]


def frozen(name: str = "stack", checkpoint: str = "none"):
    return models.CASES[name].build(checkpoint).requires_grad_(False)


def session_on(model, device=LATE, share: float = 0.1, **settings):
    return streamed(model, device, harness.some_vram(model, device, share), granularity="auto", **settings)


def tables(model) -> dict:
    """Everything that identifies a module tree: objects, classes, dtypes, devices, requires_grad, attributes."""
    found: dict = {}
    for name, module in model.named_modules():
        found[name] = (id(module), type(module), sorted(module.__dict__))
        for kind, table in (("p", module._parameters), ("b", module._buffers)):
            for leaf, t in table.items():
                if t is not None:
                    found[kind, name, leaf] = (
                        id(t), type(t), t.dtype, t.device, t.requires_grad, t.shape, t.stride(), sorted(vars(t)),
                    )  # fmt: skip
    return found


# -- detach


@each(name=list(models.CASES), device=EVERYWHERE)
def test_closing_restores_objects_classes_devices_and_values(name, device):
    case = models.CASES[name]
    model = models.freeze(case.build())
    before, values = tables(model), {k: v.clone() for k, v in model.state_dict().items()}
    session = carom.stream(model, device=device, vram=harness.some_vram(model, device, 0.3, case.slots))
    session.close()
    assert tables(model) == before
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    with carom.stream(model, device=device, vram=harness.some_vram(model, device, 0.3, case.slots)):
        harness.loss_of(model(case.inputs(0, place(device)))).backward()
    after = tables(model)
    replaced = {key for key in before if key[-1:] == ("mean",)}  # a buffer that the model itself replaces
    assert {k: v for k, v in after.items() if k not in replaced} == {
        k: v for k, v in before.items() if k not in replaced
    }
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())


@on_some_devices
@pytest.mark.parametrize("share", [0.1, 2.0])
def test_memory_is_given_back_on_close(share, device):
    model = frozen()
    vram = harness.some_vram(model, device, share)
    session = carom.stream(model, device=device, vram=vram)
    with torch.no_grad():
        model(CASE.inputs(0, place(device)))
    region = weakref.ref(inside(session).region_memory)
    session.close()
    gc.collect()
    assert region() is None
    assert inside(session).region_memory.numel() == 0 and inside(session).pinned_bytes == 0
    own = [p.untyped_storage() for p in model.parameters()]
    assert all(
        s.nbytes() <= p.numel() * p.element_size() for s, p in zip(own, model.parameters(), strict=True)
    ), "a parameter keeps a larger buffer alive"


def test_the_session_of_a_dropped_module_keeps_nothing_alive():
    model = frozen()
    session = carom.stream(model, device=LATE, vram=harness.some_vram(model, LATE, 0.1))
    session.close()
    reference = weakref.ref(model)
    del model, session
    gc.collect()
    assert reference() is None


def test_closing_twice_is_harmless_and_the_last_report_stays():
    model = frozen()
    with torch.no_grad(), session_on(model) as session:
        model(CASE.inputs())
        figures = session.report().to_dict()
    session.close()
    assert session.report().units == figures["units"] and session.report().steps == 1


def test_a_closed_session_refuses_to_be_used():
    model = frozen()
    with session_on(model) as session:
        pass
    for use in (
        lambda: session.read("stem.weight"),
        lambda: session.write("stem.weight", torch.zeros(models.D, models.D)),
        lambda: session.refresh(),
        lambda: session.set_budget(vram="1GiB"),
        lambda: session.park(),
        lambda: session.__enter__(),
    ):
        with pytest.raises(carom.CaromError, match="closed"):
            use()


def test_closing_after_an_exception_in_the_body_restores():
    model = frozen()
    before = tables(model)
    with pytest.raises(KeyError), session_on(model):
        model(CASE.inputs())
        raise KeyError("of the caller")
    assert tables(model) == before


def test_backward_after_close_names_the_closed_session():
    model = frozen()
    x = CASE.inputs().requires_grad_()
    with session_on(model):
        loss = harness.loss_of(model(x))
    with pytest.raises(carom.CaromError, match="closed"):
        loss.backward()


def test_a_forward_replaced_while_attached_survives_the_close():
    model = frozen()
    with torch.no_grad(), session_on(model):
        inner = model.blocks[0].forward
        model.blocks[0].forward = lambda x: inner(x) + 1
        expected = model(CASE.inputs())
    with torch.no_grad():
        assert torch.equal(model(CASE.inputs()), expected)


# -- refusals


def test_a_second_stream_is_refused_and_the_first_goes_on():
    model = frozen()
    with torch.no_grad(), session_on(model):
        expected = model(CASE.inputs())
        for again in (model, model.blocks[2], nn.Sequential(model)):
            with pytest.raises(carom.UnsupportedError, match="streamed"):
                carom.stream(again, device=LATE, vram=1 << 20)
        assert torch.equal(model(CASE.inputs()), expected)
    with session_on(model):
        pass  # and after the close it may be streamed again


@pytest.mark.parametrize(
    "move",
    [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.to("meta")],
    ids=["half", "bfloat16", "double", "meta"],
)
def test_another_dtype_or_device_is_refused_and_the_model_stays(move):
    model = frozen()
    with torch.no_grad(), session_on(model):
        expected = model(CASE.inputs())
        with pytest.raises(carom.UnsupportedError):
            move(model)
        assert torch.equal(model(CASE.inputs()), expected)


def test_a_part_cannot_change_its_dtype_alone():
    model = frozen()
    with torch.no_grad(), session_on(model):
        expected = model(CASE.inputs())
        with pytest.raises((carom.UnsupportedError, RuntimeError)):
            model.blocks[2].half()
        assert torch.equal(model(CASE.inputs()), expected)


@on_every_device
def test_moving_to_the_session_device_changes_nothing(device):
    model = frozen()
    where = place(device)
    if where.type == "cpu":
        pytest.skip("on the CPU .to('cpu') parks")
    with torch.no_grad(), session_on(model, device) as session:
        held = inside(session).held_bytes
        assert model.to(where) is model and inside(session).held_bytes == held


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "nowhere"}, "nowhere"),
        ({"device": "meta"}, "meta"),
        ({"granularity": "atom"}, "granularity"),
        ({"codec": "zip"}, "codec"),
        ({"pool": "vbar"}, "pool"),
        ({"host": "meta"}, "host"),
        ({"training": "maybe"}, "training"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(settings, words):
    model = frozen()
    before = tables(model)
    with pytest.raises(carom.UnsupportedError, match=words):
        carom.stream(model, **{"device": "cpu", "vram": "1GiB", **settings})
    assert tables(model) == before


def test_what_is_no_module_is_refused():
    with pytest.raises(carom.UnsupportedError, match="nn.Module"):
        carom.stream(torch.zeros(3), device="cpu")  # type: ignore[arg-type]


def test_meta_and_inference_weights_are_refused_by_name():
    with torch.device("meta"):
        model: nn.Module = models.Stack()
    with pytest.raises(carom.UnsupportedError, match="stem.weight"):
        carom.stream(model, device="cpu", vram="1GiB")
    model = frozen()
    with torch.inference_mode():
        model.blocks[1].up.weight = nn.Parameter(torch.zeros(4 * models.D, models.D), requires_grad=False)
    with pytest.raises(carom.UnsupportedError, match="blocks.1.up.weight"):
        carom.stream(model, device="cpu", vram="1GiB")


# -- what a streamed parameter is


def test_outside_its_run_a_streamed_parameter_is_its_host_tensor():
    model = frozen()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = {name: id(p) for name, p in model.named_parameters()}
    with session_on(model):
        for name, parameter in model.named_parameters():
            assert id(parameter) == objects[name] and isinstance(parameter, nn.Parameter)
            assert torch.equal(parameter, values[name])
            assert parameter.shape == values[name].shape and parameter.dtype == values[name].dtype
            assert (parameter * 2).sum().item() == (values[name] * 2).sum().item()
            assert type(parameter * 2) is torch.Tensor and type(parameter.detach()) in (
                torch.Tensor,
                nn.Parameter,
            )
            assert float(parameter.flatten()[0]) == float(values[name].flatten()[0])
            assert torch.equal(parameter.detach().cpu().clone(), values[name])


WRITES = {
    "in place": lambda p: p.mul_(1.5),
    "copy_": lambda p: p.copy_(torch.full_like(p, 0.01)),
    "an item": lambda p: p.__setitem__((0, 0), 3.0),
    "data += x": lambda p: setattr(p, "data", p.data + 0.25),
    "data.add_": lambda p: p.data.add_(0.25),
    "data =": lambda p: setattr(p, "data", torch.full_like(p, 0.02)),
    "a detached alias": lambda p: p.detach().mul_(0.5),
    "init": lambda p: nn.init.constant_(p, 0.03),
}


@pairwise(write=WRITES, slots=[1, 2, 6], device=EVERYWHERE)
def test_changes_of_host_weights_are_seen_at_the_next_forward(write, slots, device):
    """With many slots the unit is still in its slot when its host tensor changes."""
    where = place(device)
    model, plain = frozen(), frozen().to(where)
    x = CASE.inputs(0, where)
    vram = harness.least_vram(model, device, "block") * slots
    with torch.no_grad(), streamed(model, device, vram, granularity="block"):
        for block in (5, 0, 3):
            model(x)
            for net in (model, plain):
                write(net.blocks[block].up.weight)
            assert torch.equal(model(x), plain(x))


@on_every_device
def test_refresh_invalidates_what_changed_unseen(device):
    where = place(device)
    model, plain = frozen(), frozen().to(where)
    x = CASE.inputs(0, where)
    with torch.no_grad(), session_on(model, device, 0.6) as session:
        bytes_of = {u.name: memoryview(u.block.data.numpy()) for u in inside(session).placement.streamed}
        model(x)
        for name, memory in bytes_of.items():  # behind torch's back
            if name.startswith("blocks"):
                memory[:] = bytes(len(memory))
        session.refresh()
        for index, block in enumerate(plain.blocks):
            if any(name.startswith(f"blocks.{index}") for name in bytes_of):
                for path, p in block.named_parameters():
                    if model.get_parameter(f"blocks.{index}.{path}").abs().sum() == 0:
                        p.zero_()
        assert torch.equal(model(x), plain(x))
        session.refresh(model.blocks[1])
        assert torch.equal(model(x), plain(x))


@on_some_devices
def test_read_and_write_give_and_take_true_values(device):
    where = place(device)
    model, plain = frozen(), frozen().to(where)
    x = CASE.inputs(0, where)
    with torch.no_grad(), session_on(model, device, 0.4) as session:
        model(x)
        for name, parameter in plain.named_parameters():
            assert torch.equal(session.read(name), parameter.cpu())
            new = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            session.write(name, new)
            parameter.copy_(new)
            assert torch.equal(session.read(name), new)
        assert torch.equal(model(x), plain(x))
        for name in ("nothing", "blocks.9.up.weight", "blocks", ""):
            with pytest.raises(carom.WeightsError, match="no parameter"):
                session.read(name)
        with pytest.raises(carom.WeightsError, match="stem.weight"):
            session.write("stem.weight", torch.zeros(3))
        with pytest.raises(carom.WeightsError, match="stem.weight"):
            session.write("stem.weight", torch.zeros(models.D, models.D, dtype=torch.float16))


def test_what_is_read_is_a_copy():
    model = frozen()
    with session_on(model) as session:
        session.read("blocks.0.up.weight").zero_()
        assert model.blocks[0].up.weight.abs().sum() > 0


# -- state_dict and copies


@each(name=["stack", "heterogeneous", "tied", "buffers", "batchnorm"], device=EVERYWHERE)
def test_state_dict_holds_true_plain_tensors(name, device):
    model, plain = frozen(name), frozen(name)
    with session_on(model, device):
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        for key, value in plain.state_dict().items():
            assert torch.equal(state[key].cpu(), value), key
            assert type(state[key]) in (torch.Tensor, nn.Parameter), f"{key} is a {type(state[key]).__name__}"
        stream = io.BytesIO()
        torch.save(state, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True, map_location="cpu")
    assert all(torch.equal(loaded[key], value) for key, value in plain.state_dict().items())
    assert len(stream.getvalue()) < 3 * models.weight_bytes(plain) + 100_000, (
        "saving one tensor saves its unit"
    )


@on_every_device
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_seen(assign, device):
    where = place(device)
    model, plain = frozen(), CASE.build(seed=1).requires_grad_(False).to(where)
    new = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
    x = CASE.inputs(0, where)
    with torch.no_grad(), session_on(model, device, 0.4) as session:
        model(x)
        model.load_state_dict(new, assign=assign)
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x), plain(x))
        assert inside(session).held_bytes <= session.report().vram_budget_bytes
    assert all(torch.equal(p.cpu(), new[name]) for name, p in model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in model.parameters())


@on_some_devices
def test_a_deep_copy_of_an_attached_module_is_a_module_of_its_own(device):
    where = place(device)
    model, plain = frozen(), frozen()
    with torch.no_grad(), session_on(model, device) as session:
        model(CASE.inputs(0, where))
        twin = copy.deepcopy(model)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert all(
            torch.equal(p.cpu(), q) for p, q in zip(twin.parameters(), plain.parameters(), strict=True)
        )
        twin.to("cpu")
        assert torch.equal(twin(CASE.inputs()), plain(CASE.inputs()))
        twin.blocks[0].up.weight.zero_()
        twin.double()
        assert torch.equal(model(CASE.inputs(0, where)).cpu(), session.module(CASE.inputs(0, where)).cpu())
        assert model.blocks[0].up.weight.abs().sum() > 0
    with carom.stream(twin, device=device, vram=harness.some_vram(twin, device, 0.3)):
        twin(CASE.inputs(0, where).double())


def test_pickling_an_attached_module_is_refused_in_words():
    model = frozen()
    with session_on(model), pytest.raises(carom.UnsupportedError, match="state_dict"):
        torch.save(model, io.BytesIO())


def test_device_like_properties_say_where_the_model_computes():
    model = frozen()
    with session_on(model) as session:
        assert next(model.parameters()).device == inside(session).engine.device
        assert next(iter(model.blocks.parameters())).device == inside(session).engine.device


# -- adoption


@on_some_devices
def test_what_appears_after_stream_is_adopted(device):
    where = place(device)
    model, plain = frozen(), frozen()
    with session_on(model, device, 0.3):
        with torch.no_grad():
            model(CASE.inputs(0, where))
        for net in (model, plain):
            net.extra = nn.Linear(models.D, models.D)
            nn.init.constant_(net.extra.weight, 0.1)
            nn.init.zeros_(net.extra.bias)
            net.register_buffer("shift", torch.full((models.D,), 0.5))
            head = net.head
            net.head = nn.Sequential(head, net.extra)
        plain.to(where)
        for net in (model, plain):
            harness.loss_of(net(CASE.inputs(1, where))).backward()
        assert model.extra.weight.device.type == where.type and model.shift.device.type == where.type
        assert torch.equal(model.extra.weight.grad, plain.extra.weight.grad)
    assert type(model.extra.weight) is nn.Parameter


@on_every_device
def test_blocks_replaced_while_attached_are_laid_out_anew(device):
    where = place(device)
    model, plain = frozen(), frozen()
    with torch.no_grad(), session_on(model, device, 0.2) as session:
        model(CASE.inputs(0, where))
        for net in (model, plain):
            torch.manual_seed(5)
            net.blocks[2] = models.Block().requires_grad_(False)
            net.blocks.append(models.Block().requires_grad_(False))
            del net.blocks[0]
        plain.to(where)
        for seed in range(3):
            assert torch.equal(model(CASE.inputs(seed, where)), plain(CASE.inputs(seed, where)))
        report = session.report()
        assert report.vram_peak_bytes <= report.vram_budget_bytes


@on_some_devices
def test_thawed_weights_get_gradients(device):
    where = place(device)
    model, plain = frozen(), frozen().to(where)
    with session_on(model, device, 0.2):
        harness.loss_of(model(CASE.inputs(0, where).requires_grad_())).backward()
        for net in (model, plain):
            net.blocks[1].up.weight.requires_grad_(True)
            harness.loss_of(net(CASE.inputs(1, where))).backward()
        grad = model.blocks[1].up.weight.grad
        assert grad is not None and torch.equal(grad.cpu(), plain.blocks[1].up.weight.grad.cpu())
        assert model.blocks[2].up.weight.grad is None
        model.blocks[1].up.weight.grad = None
        model.blocks[1].up.weight.requires_grad = False
        harness.loss_of(model(CASE.inputs(1, where).requires_grad_())).backward()
        assert model.blocks[1].up.weight.grad is None


@on_some_devices
def test_discarding_leaves_on_the_device_what_lies_there_and_ends_the_rest(device):
    model = frozen()
    session = carom.stream(model, device=device, vram=harness.some_vram(model, device, 0.5))
    streams = {name for unit in inside(session).streamed for name in unit.weights}
    there = {name: p.data_ptr() for name, p in model.named_parameters() if name not in streams}
    assert there and streams
    session.close(discard=True)
    after = dict(model.named_parameters())
    assert {name: after[name].data_ptr() for name in there} == there, "nothing was copied"
    assert all(after[name].device == place(device) for name in there)
    assert all(type(p) is nn.Parameter for p in after.values())
    session.close()
    carom.stream(model.to("cpu"), device=device, vram=harness.some_vram(model, device, 0.5)).close()
