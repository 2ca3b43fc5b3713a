"""A thin mixin over a patcher's own class: ComfyUI goes on deciding when and how much, Carom carries the weights.

ComfyUI keeps applying LoRA, dtype casts and quantised kernels: its own low-VRAM load is run with room for nothing,
so it moves no weight and attaches every patch as a function; the session then puts each weight on the device before
its module runs. Works over any static patcher class, other packs' included, because nothing of it is replaced.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..core.common.errors import BudgetError, CaromError, UnsupportedError
from ..core.streaming.pass_retry import OutOfMemory
from . import comfyui_api
from .inference_tensors import own_memory, own_tensors
from .node_settings import Settings, most_held, next_budget, parse_limit, rounded
from .streaming import Streaming, streaming_of

KEY = "carom"  # of our attachment, which clones of a patcher carry on
NOTHING = 1  # bytes: what ComfyUI's own load may put on the device; 0 would mean "everything"
_classes: dict[type, type] = {}


class CaromPatcher:
    """Mixed in before a patcher class by `wear`. Overrides take any arguments, as releases add some."""

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

    def _limit(self) -> float:
        given = parse_limit(self._settings.vram, comfyui_api.device_bytes(self.load_device))
        return most_held(self._settings.mode, given, self._carom.total)

    def model_size(self, *args: Any, **kwargs: Any) -> int:
        """What the model wants on the device: its true size, or the user's limit if that is less."""
        return int(min(self._carom.total, self._limit()))

    def loaded_size(self, *args: Any, **kwargs: Any) -> int:
        self._carom.follow()
        return super().loaded_size(*args, **kwargs)  # type: ignore[misc]

    def get_free_memory(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        """By this ComfyUI decides whether prompts run as one batch, which matters more than weights that stay: as
        before room was taken."""
        self._carom.follow()
        taken = self._carom.taken if device == self.load_device else 0
        return super().get_free_memory(device, *args, **kwargs) + taken  # type: ignore[misc]

    # -- loading

    def load(
        self, device_to: Any = None, lowvram_model_memory: float = 0, force_patch_weights: bool = False,
        full_load: bool = False, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self._carom.succeed()
        offered = math.inf if full_load or lowvram_model_memory == 0 else lowvram_model_memory
        bound = min(offered, self._limit())
        carom = self._carom
        if bound >= carom.total:
            self._leave()
            carom.note = ""
        elif not carom.note:
            try:
                return self._stream(device_to, int(bound), force_patch_weights)
            except CaromError as error:
                if self._settings.mode == "stream" or isinstance(error, BudgetError):
                    raise
                self._leave()
                own_memory(self.model)
                carom.note = f"ComfyUI keeps the weights: {error}"
                comfyui_api.say(f"Carom: {carom.note}", self._settings.node)
        return super().load(  # type: ignore[misc]
            device_to, *args, lowvram_model_memory=lowvram_model_memory, force_patch_weights=force_patch_weights,
            full_load=full_load, **kwargs,
        )  # fmt: skip

    def _stream(self, device_to: Any, bound: int, force_patch_weights: bool) -> None:
        """ComfyUI attaches its patches, then the session takes the weights (or changes its budget)."""
        carom, model = self._carom, self.model
        if not carom.active and model.current_weight_patches_uuid is not None:
            self._unload()  # ComfyUI had loaded it itself
        carom.active = True
        try:
            # By name, as ComfyUI itself calls it: other packs' overrides rely on that (GGUF).
            super().load(  # type: ignore[misc]
                device_to,
                lowvram_model_memory=NOTHING,
                force_patch_weights=force_patch_weights,
                full_load=False,
            )
            self._patch_rest(device_to)
            self._take(bound)
        except BaseException:
            carom.close()
            raise
        comfyui_api.say(carom.line(carom.held), self._settings.node)

    def _patch_rest(self, device_to: Any) -> None:
        """Patches of weights that ComfyUI cannot cast on the fly are merged, as its full load would."""
        for key in list(self.patches):
            if not isinstance(key, str) or key in self.backup:
                continue
            path, _, leaf = key.rpartition(".")
            try:
                owner = self.model.get_submodule(path)
            except AttributeError:
                continue
            if not (hasattr(owner, "comfy_cast_weights") and leaf in ("weight", "bias")):
                self.patch_weight_to_device(key, device_to=device_to)  # type: ignore[attr-defined]

    def _take(self, offer: int) -> None:
        carom = self._carom
        bound = carom.bound(offer, self.load_device, self._limit())
        try:
            self._settle(bound)
        except OutOfMemory:
            if bound <= rounded(offer):
                raise
            carom.forget_room()
            self._settle(rounded(offer))
        self.model.model_loaded_weight_memory = carom.held
        carom.expected = (self.model.current_weight_patches_uuid, carom.held)

    def _settle(self, bound: int) -> None:
        """Have a session with a budget of ``bound`` bytes, or the one there is where that is near enough."""
        carom = self._carom
        carom.succeed()  # while ComfyUI loaded, a patcher of ours may have let go of the model
        carom.active = True
        if carom.suspended and carom.packs and self._compiled():
            carom.close()
        if carom.suspended:
            own_tensors(self.model)
            carom.resume(bound, self._settings)
        elif carom.session is None:
            settings = self._settings
            if self._compiled():
                # Compiled code looks at parameters between runs, when packed ones have no memory.
                settings = replace(settings, codec="raw")
            carom.open(self.load_device, bound, settings)
        else:
            own_tensors(self.model)
            budget = next_budget(carom.budget, carom.held, carom.streamed, bound, self._limit())
            if budget is not None:
                carom.resize(budget)
        if self._compiled():
            carom.lengthen()
        carom.follow_room(self._limit())
        carom.rank(self._settings.priority)

    def _compiled(self) -> bool:
        """Whether a compile node wrapped the model: as a whole, or block by block (ComfyUI's helper, or object patches)."""
        wrapped = any("torch.compile" in keys for keys in getattr(self, "wrappers", {}).values())
        patches = getattr(self, "object_patches", {}).values()
        return wrapped or any(type(patch).__name__ == "OptimizedModule" for patch in patches)

    def _leave(self) -> None:
        """The weights become ComfyUI's again, none of them loaded."""
        if self._carom.active:
            self._carom.close()
            self._unload()
        self._carom.close()  # suspended

    def _unload(self) -> None:
        """No weight on the device, no patch in a weight; object patches stay."""
        super().unpatch_model(self.offload_device, unpatch_weights=True)  # type: ignore[misc]
        before, self.skip_injection = self.skip_injection, True  # who called for a load injects after it
        try:
            super().patch_model(load_weights=False)  # type: ignore[misc]
        finally:
            self.skip_injection = before

    def partially_load(self, device_to: Any, extra_memory: float = 0, *args: Any, **kwargs: Any) -> Any:
        carom, model = self._carom, self.model
        carom.succeed()
        if carom.session is not None and carom.packs and self._compiled():
            carom.close()
        force = bool(args[0] if args else kwargs.get("force_patch_weights", False))
        before = self.loaded_size()
        bound = max(0, min(before + extra_memory, self._limit()))
        if bound >= carom.total:
            if carom.session is not None:
                if carom.streams:
                    extra_memory += before
                self._leave()
            return super().partially_load(device_to, extra_memory, *args, **kwargs)  # type: ignore[misc]
        if carom.session is None and carom.note:
            return super().partially_load(device_to, extra_memory, *args, **kwargs)  # type: ignore[misc]
        with self.use_ejected(skip_and_inject_on_exit_only=True):  # type: ignore[attr-defined]
            known = model.current_weight_patches_uuid
            changed = known is not None and (known != self.patches_uuid or force)  # type: ignore[attr-defined]
            ours = carom.streams
            if ours and changed and (self.backup or carom.dressed):
                carom.close()  # patches are taken out of weights, which must be ComfyUI's own for that
            # None: the functions go, the weights stay where the session has them.
            super().unpatch_model(None, unpatch_weights=changed and ours)  # type: ignore[misc]
            self.patch_model(load_weights=False)  # type: ignore[attr-defined]
            try:
                if carom.session is None or changed or known is None:
                    self.load(device_to, max(NOTHING, int(bound)), force, False)
                else:
                    self._take(int(bound))
            except Exception:
                self.detach()  # type: ignore[attr-defined]
                raise
        return self.loaded_size() - before

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, *args: Any, **kwargs: Any) -> Any:
        carom = self._carom
        carom.succeed()
        if not carom.streams:
            return super().partially_unload(device_to, memory_to_free, *args, **kwargs)  # type: ignore[misc]
        carom.follow()
        carom.asked_back(int(memory_to_free))
        with self.use_ejected():  # type: ignore[attr-defined]
            freed = carom.resize(max(0, int(carom.held - memory_to_free)))
            carom.follow_room(self._limit())
            self.model.model_loaded_weight_memory = carom.held
            carom.expected = (self.model.current_weight_patches_uuid, carom.held)
        comfyui_api.say(carom.line(carom.held), self._settings.node)
        return freed

    def unpatch_model(
        self, device_to: Any = None, unpatch_weights: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        carom = self._carom
        expecting = carom.succeed()
        if unpatch_weights and device_to is not None:
            if carom.streams and not self.backup and not carom.dressed:
                carom.suspend()
            elif not carom.suspended:
                carom.close()
        result = super().unpatch_model(device_to, unpatch_weights, *args, **kwargs)  # type: ignore[misc]
        if carom.suspended or expecting:
            carom.expect_successor()
        return result

    def detach(self, *args: Any, **kwargs: Any) -> Any:
        """A clone takes over: one of ours takes the session too, ComfyUI's own must find the weights its own."""
        self._carom.succeed()
        result = super().detach(*args, **kwargs)  # type: ignore[misc]
        self._carom.expect_successor()
        return result

    def pin_weight_to_device(self, *args: Any, **kwargs: Any) -> Any:
        """The session pins what it streams; pinning the same weights twice would take the room of others."""
        if not self._carom.active:
            return super().pin_weight_to_device(*args, **kwargs)  # type: ignore[misc]
        return None

    # -- clones and runs

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        copy = super().clone(*args, **kwargs)  # type: ignore[misc]
        return copy if copy.is_dynamic() else wear(copy, self._settings)

    def pre_run(self, *args: Any, **kwargs: Any) -> Any:
        if self._carom.session is not None:
            self._carom.session.expect_anew()
        comfyui_api.say(self._carom.line(self.loaded_size()), self._settings.node)
        return super().pre_run(*args, **kwargs)  # type: ignore[misc]

    def cleanup(self, *args: Any, **kwargs: Any) -> Any:
        carom = self._carom
        if carom.streams:
            carom.remember_room()
            comfyui_api.say(carom.line(carom.held, carom.stall_share()), self._settings.node)
        return super().cleanup(*args, **kwargs)  # type: ignore[misc]


def settings_of(patcher: Any) -> Settings | None:
    """The settings a Carom node gave this patcher or the one it is a clone of."""
    return getattr(patcher, "attachments", {}).get(KEY)


def wear(patcher: Any, settings: Settings) -> Any:
    """``patcher`` itself, of its own class with `CaromPatcher` before it. Raises UnsupportedError for dynamic ones."""
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
    """``patcher`` itself, of the class it had before `wear`."""
    if isinstance(patcher, CaromPatcher):
        patcher.__class__ = type(patcher).__mro__[2]
        patcher.size = 0  # clones carry what `model_size` said; let it be counted again
    return patcher
