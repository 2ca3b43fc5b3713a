"""`CaromPatcher`, a mixin over a patcher's own class, with which a Carom session moves the model's weights.

ComfyUI decides when a model is loaded and how much memory its weights may take.
ComfyUI still applies LoRA, dtype casts and quantised kernels. Its low-VRAM load runs with a budget of 1 byte, so that
the load moves no weight and attaches each patch as a function. The session then puts each weight on the device before
its module runs. The mixin works over any static patcher class, those of other node packs included, because its methods
call the methods of that class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..core.common.errors import BudgetError, CaromError, UnsupportedError
from ..core.model.new_parameter import without_values
from ..core.streaming.pass_retry import OutOfMemory
from . import comfyui_api
from .device_room import make_room
from .inference_tensors import own_memory, own_tensors
from .meant_dtypes import settle_dtypes
from .module_roots import move_rest
from .node_settings import Settings, gives_whole, most_held, next_budget, parse_limit, rounded
from .patch_memory import memory_needed
from .quantized_weights import attributes_only, merges
from .read_ahead import hurry
from .streaming import Streaming, streaming_of
from .watched_patches import watching

KEY = "carom"  # key of Carom's entry in a patcher's attachments, which clones inherit
NOTHING = 1  # bytes that ComfyUI's own load may put on the device; 0 would mean "everything"
_classes: dict[type, type] = {}


class CaromPatcher:
    """A mixin that `wear` puts before a patcher's class. Overrides accept any arguments, because releases add some."""

    model: Any
    load_device: torch.device
    offload_device: torch.device
    patches: dict
    backup: dict
    size: int
    skip_injection: bool

    @property
    def _carom(self) -> Streaming:
        return streaming_of(self.model)

    @property
    def _settings(self) -> Settings:
        return settings_of(self) or Settings()

    # -- sizes

    def _limit(self, patches: int = 0) -> float:
        """Return the bytes that weights may take. ``patches``: bytes of the user's limit that patches take."""
        return most_held(self._settings.mode, max(0, self._given_limit() - patches), self._carom.total)

    def _given_limit(self) -> float:
        return parse_limit(self._settings.vram, comfyui_api.device_bytes(self.load_device))

    def model_size(self, *args: Any, **kwargs: Any) -> int:
        """Return the bytes on the device, so that ComfyUI frees none for a load: `current_loaded_device` did that.

        Where ComfyUI itself loads the weights, or has loaded them: the model's size, or the user's limit if that is less.
        """
        carom = self._carom
        if carom.loads_whole or (
            carom.session is None and self.model.current_weight_patches_uuid is not None
        ):
            return int(min(carom.total, self._limit()))
        return self.loaded_size()

    def current_loaded_device(self, *args: Any, **kwargs: Any) -> Any:
        """Return the device of the weights.

        ComfyUI calls this once for each model that it is about to load, after it took these models off its list of
        loaded models, and before it frees memory for them. So the memory for the weights and for passes is taken here.
        """
        carom = self._carom
        patches = 0 if carom.session is None else carom.patches.wanted
        wanted = int(min(carom.total, self._limit(patches))) + patches - self.loaded_size()
        # ComfyUI frees up to twice the bytes that it then keeps: those of passes with a batch of two.
        make_room(self.load_device, wanted + 2 * max(carom.for_passes, comfyui_api.least_for_passes()))
        return super().current_loaded_device(*args, **kwargs)  # type: ignore[misc]

    def loaded_size(self, *args: Any, **kwargs: Any) -> int:
        self._carom.follow()
        return super().loaded_size(*args, **kwargs)  # type: ignore[misc]

    def get_free_memory(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the free bytes of ``device``, plus the bytes that the session holds beyond ComfyUI's offer.

        ComfyUI decides by this figure whether prompts run as one batch. A batch matters more than resident weights.
        """
        self._carom.follow()
        taken = self._carom.taken if device == self.load_device else 0
        return super().get_free_memory(device, *args, **kwargs) + taken  # type: ignore[misc]

    # -- loading

    def load(
        self, device_to: Any = None, lowvram_model_memory: float = 0, force_patch_weights: bool = False,
        full_load: bool = False, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self._carom.succeed()
        self._carom.follow_settings(self._settings)
        for path in self._carom.files:
            hurry(path)
        offered = math.inf if full_load or lowvram_model_memory == 0 else lowvram_model_memory
        carom = self._carom
        whole = self._loads_whole(min(offered, self._limit()))
        if whole and self.patches:
            # ComfyUI merges patches and rounds the sums to the weights' dtype: not to that of a float8 file.
            self._leave()
            settle_dtypes(self.model, self._settings.ram)
            carom.measure_model()
        if whole:
            self._leave()
            carom.note = ""
        elif not carom.note:
            try:
                return self._stream(device_to, offered, force_patch_weights)
            except CaromError as error:
                if self._settings.mode == "stream" or isinstance(error, BudgetError):
                    raise
                self._leave()
                own_memory(self.model)
                carom.note = f"ComfyUI keeps the weights: {error}"
                comfyui_api.say(f"Carom: {carom.note}", self._settings.node)
        if self.model.current_weight_patches_uuid is None:
            forget_casts(self.model)
        try:
            with watching(self), carom.loading_whole():
                return super().load(  # type: ignore[misc]
                    device_to, *args, lowvram_model_memory=lowvram_model_memory, force_patch_weights=force_patch_weights,
                    full_load=full_load, **kwargs,
                )  # fmt: skip
        except OutOfMemory:
            if carom.note:
                raise
        # What merging patches takes was missing beside the whole model. Streamed weights leave it free.
        self._unload()
        return self._stream(device_to, carom.total - 1, force_patch_weights)

    def _stream(self, device_to: Any, offered: float, force_patch_weights: bool) -> None:
        """Let ComfyUI attach its patches, then let the session take the weights or change its budget.

        ``offered``: bytes of the device that ComfyUI offers for weights.
        """
        carom, model = self._carom, self.model
        if not carom.active and model.current_weight_patches_uuid is not None:
            self._unload()  # ComfyUI had loaded the model itself
        if carom.changes.dressed and any(merges(owner, leaf) for _, owner, leaf in self._patched_weights()):
            carom.close()
        if not getattr(self, "mmap_released", True):
            # ComfyUI-GGUF would copy each weight to the device and back, so that none is left in the mapped file.
            self.mmap_released = True
        forget_casts(model)
        carom.active = True
        try:
            if carom.suspended and carom.from_disk:
                self._take(offered)  # a weight on disk can be read only while its session is not suspended
            # Keyword arguments, as in ComfyUI's own call: overrides of other node packs rely on them (GGUF).
            with watching(self), attributes_only():
                super().load(  # type: ignore[misc]
                    device_to,
                    lowvram_model_memory=NOTHING,
                    force_patch_weights=force_patch_weights,
                    full_load=False,
                )
                self._patch_rest(device_to)
            carom.patches.attach(model, self.load_device)
            carom.needs = memory_needed(self) + carom.patches.wanted
            self._take(offered)
        except BaseException:
            carom.close()
            raise
        comfyui_api.say(carom.line(carom.loaded), self._settings.node)

    def _patch_rest(self, device_to: Any) -> None:
        """Merge the patches of weights that ComfyUI cannot cast on the fly, as ComfyUI's full load does."""
        for key, owner, leaf in self._patched_weights():
            if key not in self.backup and not (
                hasattr(owner, "comfy_cast_weights") and leaf in ("weight", "bias")
            ):
                self.patch_weight_to_device(key, device_to=device_to)  # type: ignore[attr-defined]

    def _patched_weights(self) -> Iterator[tuple[str, torch.nn.Module, str]]:
        """Yield (key, module, name in the module) of each weight that has patches."""
        for key in [key for key in self.patches if isinstance(key, str)]:
            path, _, leaf = key.rpartition(".")
            try:
                owner = self.model.get_submodule(path)
            except AttributeError:
                continue
            yield key, owner, leaf

    def _take(self, offered: float) -> None:
        carom = self._carom
        carom.for_passes = max(
            0, int(comfyui_api.free_bytes(self.load_device) + carom.loaded - min(offered, 1 << 60))
        )
        offer = carom.for_weights(offered)
        bound = carom.bound(offer, self.load_device, self._limit(carom.patches.wanted))
        try:
            self._settle(bound)
        except OutOfMemory:
            if bound <= rounded(offer):
                raise
            carom.forget_room()
            self._settle(rounded(offer))
        carom.count_loaded()

    def _settle(self, bound: int) -> None:
        """Open, resume or resize the session for a budget of ``bound`` bytes, and prepare the patches beside it.

        A running session keeps its budget where `next_budget` finds no reason for a new layout.
        """
        carom = self._carom
        carom.succeed()  # while ComfyUI loaded, another patcher of Carom may have released the model
        carom.active = True
        if carom.suspended and carom.packs and self._compiled():
            carom.close()
        if carom.session is None:
            settings = self._settings
            compiled = self._compiled()
            if compiled:
                # Compiled code reads parameters between runs, when packed parameters have no memory.
                settings = replace(settings, codec="raw")
            carom.open(self.load_device, bound, settings, compiled)
        else:
            if not (carom.suspended and carom.from_disk):
                own_tensors(self.model)
            budget = self._new_budget(bound)
            if carom.suspended:
                carom.resume(budget, self._settings)
            elif budget is not None:
                carom.resize(budget)
            if budget is not None:
                carom.left = None
        carom.limit_changed = False
        if self._compiled():
            carom.changes.lengthen()
        carom.prepare_patches(bound, self._given_limit())
        carom.follow_room(self._limit(carom.patches.nbytes))
        carom.rank(self._settings.priority)

    def _new_budget(self, bound: int) -> int | None:
        """Return the new budget of the session for an offer of ``bound`` bytes, None to keep the present one.

        A suspended session has the layout that it had on the device, and returns to it under the same budget.
        """
        carom = self._carom
        limit = self._limit(carom.patches.wanted)
        budget = next_budget(
            carom.budget, carom.layout_bytes, carom.layout_streams, bound, limit, carom.suspended
        )
        if budget is None and carom.limit_changed and bound != carom.budget:
            return bound  # differences are tolerated in what ComfyUI offers, not in what the user asks for
        if budget is None and carom.needs_more and bound < carom.layout_bytes:
            return (
                bound  # passes need the memory; a difference is tolerated only where they need what they did
            )
        return budget

    def _compiled(self) -> bool:
        """Return whether a compile node wrapped the model, as a whole or block by block.

        Blocks are wrapped by ComfyUI's helper or by object patches.
        """
        wrapped = any("torch.compile" in keys for keys in getattr(self, "wrappers", {}).values())
        patches = getattr(self, "object_patches", {}).values()
        return wrapped or any(type(patch).__name__ == "OptimizedModule" for patch in patches)

    def _loads_whole(self, bound: float) -> bool:
        """Return whether ComfyUI loads the weights itself if they may take ``bound`` bytes of the device.

        A model that a dynamic patcher had before keeps its session: ComfyUI's static load and unload would copy the whole
        model through pageable memory at every switch between models (8 s for 10 GB on the host of an H200).
        """
        return bound >= self._carom.total and not self._carom.was_dynamic

    def _leave(self) -> None:
        """Close the session, so that ComfyUI manages the weights again. No weight is on the device afterwards."""
        if self._carom.active:
            self._carom.close()
            self._unload()
        self._carom.close()  # a suspended session

    def _unload(self) -> None:
        """Take weights off the device and patches out of the weights. Object patches stay."""
        super().unpatch_model(self.offload_device, unpatch_weights=True)  # type: ignore[misc]
        before, self.skip_injection = self.skip_injection, True  # the caller of the load injects afterwards
        try:
            super().patch_model(load_weights=False)  # type: ignore[misc]
        finally:
            self.skip_injection = before

    def partially_load(self, device_to: Any, extra_memory: float = 0, *args: Any, **kwargs: Any) -> Any:
        carom, model = self._carom, self.model
        if carom.in_pass:
            return 0  # the weights are where they were: see `detach`
        carom.succeed()
        carom.follow_settings(self._settings)
        if carom.session is not None and carom.packs and self._compiled():
            carom.close()
        force = bool(args[0] if args else kwargs.get("force_patch_weights", False))
        before = self.loaded_size()
        whole = self._loads_whole(max(0, min(before + extra_memory, self._limit())))
        if whole and carom.session is not None:
            if carom.streams:
                extra_memory += before
            self._leave()
        if whole or (carom.session is None and carom.note):
            with carom.loading_whole():
                return super().partially_load(device_to, extra_memory, *args, **kwargs)  # type: ignore[misc]
        with self.use_ejected(skip_and_inject_on_exit_only=True):  # type: ignore[attr-defined]
            known = model.current_weight_patches_uuid
            changed = known is not None and (known != self.patches_uuid or force)  # type: ignore[attr-defined]
            ours = carom.session is not None
            if ours and changed and self.backup:
                carom.close()  # ComfyUI can take patches only out of its own weights
            # Device None removes the patch functions and leaves the weights where the session put them.
            super().unpatch_model(None, unpatch_weights=changed and ours)  # type: ignore[misc]
            if changed and ours:
                carom.changes.forget_patches()
            self.patch_model(load_weights=False)  # type: ignore[attr-defined]
            try:
                if carom.session is None or changed or known is None:
                    self.load(device_to, max(NOTHING, before + extra_memory), force, False)
                else:
                    self._take(before + extra_memory)
            except Exception:
                self.detach()  # type: ignore[attr-defined]
                raise
        return self.loaded_size() - before

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, *args: Any, **kwargs: Any) -> Any:
        carom = self._carom
        if carom.in_pass:
            return 0
        carom.succeed()
        if not carom.streams:
            return super().partially_unload(device_to, memory_to_free, *args, **kwargs)  # type: ignore[misc]
        carom.follow()
        carom.asked_back(int(memory_to_free))
        freed = carom.loaded
        with self.use_ejected():  # type: ignore[attr-defined]
            if gives_whole(memory_to_free, carom.streamed) and not self.backup:
                carom.suspend(attached=True)
            else:
                freed = carom.resize(max(0, int(carom.held - memory_to_free)))
                carom.left = carom.budget
                if freed < memory_to_free:
                    freed += carom.patches.put_aside()
                carom.follow_room(self._limit(carom.patches.nbytes))
            carom.count_loaded()
        comfyui_api.say(carom.line(carom.loaded), self._settings.node)
        return freed

    def unpatch_model(
        self, device_to: Any = None, unpatch_weights: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        carom = self._carom
        expecting = carom.succeed()
        if unpatch_weights and device_to is not None:
            if carom.streams and not self.backup:
                carom.suspend()
            elif not carom.suspended:
                carom.close()
            carom.active = False
            carom.changes.forget_patches()
        if carom.suspended and carom.from_disk and device_to is not None:
            result = super().unpatch_model(None, unpatch_weights, *args, **kwargs)  # type: ignore[misc]
            move_rest(self.model, device_to)
        else:
            result = super().unpatch_model(device_to, unpatch_weights, *args, **kwargs)  # type: ignore[misc]
        if carom.suspended or expecting:
            carom.expect_successor()
        return result

    def detach(self, *args: Any, **kwargs: Any) -> Any:
        """Release the model to a clone.

        A clone of Carom's class takes over the session. For any other clone the session ends first. Within a forward of
        the model nothing is released: nodes load a VAE or an encoder there, and then the model again.
        """
        if self._carom.in_pass:
            return self.model
        self._carom.succeed()
        result = super().detach(*args, **kwargs)  # type: ignore[misc]
        self._carom.expect_successor()
        return result

    def pin_weight_to_device(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing while Carom has the weights.

        The session pins the streamed weights. Pinning them a second time would take pinned memory from other models.
        """
        if not self._carom.active:
            return super().pin_weight_to_device(*args, **kwargs)  # type: ignore[misc]
        return None

    def model_state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        """Return ComfyUI's state dict, whose parameters are cast, patched and read when they are written to the file.

        Of the parameters that it is made of ComfyUI uses only shape and dtype, so weights that wait packed or on disk
        are not read for them.
        """
        with without_values():
            return super().model_state_dict_for_saving(*args, **kwargs)  # type: ignore[misc]

    # -- clones and runs

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        copy = super().clone(*args, **kwargs)  # type: ignore[misc]
        return copy if copy.is_dynamic() else wear(copy, self._settings)

    def pre_run(self, *args: Any, **kwargs: Any) -> Any:
        if self._carom.session is not None:
            self._carom.session.expect_anew()
            # for the next model, or for the text encoder of the next prompt
            self._carom.session.prepare_park(comfyui_api.pin_room())
            self._carom.claim_ram(self._settings)
        comfyui_api.say(self._carom.line(self.loaded_size()), self._settings.node)
        return super().pre_run(*args, **kwargs)  # type: ignore[misc]

    def cleanup(self, *args: Any, **kwargs: Any) -> Any:
        carom = self._carom
        if carom.streams:
            carom.remember_room()
            carom.count_pinned()  # `prepare_park` has pinned memory meanwhile
            comfyui_api.say(carom.line(carom.loaded, carom.stall_share()), self._settings.node)
        return super().cleanup(*args, **kwargs)  # type: ignore[misc]


def forget_casts(model: torch.nn.Module) -> None:
    """Take back the casts and patch functions that ComfyUI left on the modules of a model that it unloaded.

    Where casts are forced (text encoders, ModelComputeDtype), ComfyUI's whole load marks each module as its low-VRAM
    load does, and unloading removes only the marks of low-VRAM loads. The next low-VRAM load attaches no patch to a
    module with the mark.
    """
    for module in model.modules():
        if hasattr(module, "prev_comfy_cast_weights"):
            comfyui_api.wipe_casts(module)


def settings_of(patcher: Any) -> Settings | None:
    """Return the settings that a Carom node gave ``patcher`` or the patcher it was cloned from, None without any."""
    return getattr(patcher, "attachments", {}).get(KEY)


def wear(patcher: Any, settings: Settings) -> Any:
    """Return ``patcher`` itself after its class was changed to a subclass of `CaromPatcher` and its own class.

    Raises UnsupportedError for a dynamic patcher.
    """
    if patcher.is_dynamic():
        raise UnsupportedError(
            "a dynamic patcher keeps its weights; clone it with disable_dynamic=True first"
        )
    patcher.attachments[KEY] = settings
    own = type(patcher)
    if not issubclass(own, CaromPatcher):
        if own not in _classes:
            _classes[own] = type("Carom" + own.__name__, (CaromPatcher, own), {})
        patcher.__class__ = _classes[own]
    return patcher


def strip(patcher: Any) -> Any:
    """Return ``patcher`` itself after its class was changed back to the class before `wear`."""
    if isinstance(patcher, CaromPatcher):
        patcher.__class__ = type(patcher).__mro__[2]
        patcher.size = 0  # clones inherit the result of `model_size`; 0 makes ComfyUI count again
    return patcher
