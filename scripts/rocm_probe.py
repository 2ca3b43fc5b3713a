"""The proof, run in a child by rocm_setup.py because any of its steps may crash or hang.

Every step writes a line before and after, so that the parent can name the step that never came
back. Order follows comfy-aimdo's needs: its init, then torch touches the GPU, then init_devices,
and only then the modules that bind the library when imported. Nothing is written to disk.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path

MARK = "@carom "
MIB = 1 << 20
LOG: list = []


class Failed(Exception):
    """A step failed in a way that has a name: ``kind`` is an entry of rocm_findings.EXITS."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def tell(**event: object) -> None:
    # A fresh line each: libraries print to the same stream.
    sys.stdout.write("\n" + MARK + json.dumps(event, default=str) + "\n")
    sys.stdout.flush()


def step(name: str, action) -> bool:
    """Run one step between its two lines; True if it passed. Its dict becomes part of the line."""
    tell(step=name, state="start")
    LOG.clear()
    try:
        told = action() or {}
    except Failed as error:
        tell(step=name, state="fail", kind=error.kind, message=str(error), log=LOG[-5:])
        return False
    except BaseException as error:  # SystemExit of a library too: the parent must get a line
        message = f"{type(error).__name__}: {error}"
        # ctypes on Windows turns an access violation into an OSError.
        kind = "access_violation" if "access violation" in message else "probe_failed"
        tell(step=name, state="fail", kind=kind, message=message[:2000], log=LOG[-5:])
        return False
    tell(step=name, state="ok", **told)
    return True


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOG.append(record.getMessage()[:500])


def loaded_libraries() -> list:
    """Paths of the libraries in this process whose name contains amdhip64."""
    if sys.platform == "win32":
        paths = _windows_modules()
    else:
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
                paths = [line.split(None, 5)[5].strip() for line in maps if line.count("/")]
        except OSError:
            return []
    return sorted({p for p in paths if "amdhip64" in os.path.basename(p.replace("\\", "/")).lower()})


def _windows_modules() -> list:
    if sys.platform != "win32":
        return []
    import ctypes
    from ctypes import wintypes

    kernel = ctypes.WinDLL("kernel32")
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    enum = kernel.K32EnumProcessModules
    enum.argtypes = [
        wintypes.HANDLE, ctypes.POINTER(wintypes.HMODULE), wintypes.DWORD, ctypes.POINTER(wintypes.DWORD),
    ]  # fmt: skip
    name = kernel.GetModuleFileNameW
    name.argtypes = [wintypes.HMODULE, wintypes.LPWSTR, wintypes.DWORD]
    handles, needed = (wintypes.HMODULE * 4096)(), wintypes.DWORD()
    if not enum(kernel.GetCurrentProcess(), handles, ctypes.sizeof(handles), ctypes.byref(needed)):
        return []
    paths, buffer = [], ctypes.create_unicode_buffer(32768)
    for handle in handles[: needed.value // ctypes.sizeof(wintypes.HMODULE)]:
        if name(handle, buffer, len(buffer)):
            paths.append(buffer.value)
    return paths


def load_carom(root: str):
    """Carom as installed (or staged); else the checkout ``root``, whatever its folder is called."""
    if importlib.util.find_spec("carom") is None and root:
        init = Path(root) / "__init__.py"
        spec = importlib.util.spec_from_file_location("carom", str(init), submodule_search_locations=[root])
        if spec is None or spec.loader is None or not init.is_file():
            raise Failed("no_carom", f"no Carom in {root}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["carom"] = module
        spec.loader.exec_module(module)
    try:
        carom = importlib.import_module("carom")
        missing = [n for n in ("stream", "__version__") if not hasattr(carom, n)]
    except ImportError as error:
        raise Failed("no_carom", f"Carom does not import: {error}") from error
    if missing:
        raise Failed("no_carom", f"this Carom has no carom.{missing[0]}")
    return carom


class Proof:
    """The steps; each returns what is worth telling, or raises."""

    def __init__(self, device: str, root: str, version: str) -> None:
        self.device_name, self.root, self.expected_torch = device, root, version
        self.on_gpu = device != "cpu"

    def aimdo_init(self):
        try:
            self.control = importlib.import_module("comfy_aimdo.control")
        except ImportError as error:
            raise Failed("no_aimdo", f"comfy_aimdo does not import: {error}") from error
        if not self.control.init():
            why = next((m for m in reversed(LOG) if "fail" in m.lower()), "it gave no reason")
            raise Failed("init_false", f"comfy_aimdo.control.init() returned False: {why}")
        return {"where": getattr(self.control, "__file__", "")}

    def import_torch(self):
        self.torch = importlib.import_module("torch")
        version = self.torch.__version__
        if self.expected_torch and version != self.expected_torch:
            raise Failed("probe_failed", f"another torch was imported: {version}")
        return {"version": version}

    def gpu(self):
        torch = self.torch
        if not self.on_gpu:
            self.device = torch.device("cpu")
            return {"name": "CPU"}
        if not torch.cuda.is_available():
            raise Failed(
                "no_gpu", "torch.cuda.is_available() is False: no GPU this torch supports, or no driver"
            )
        self.device = torch.device("cuda", 0)
        self.free, self.total = torch.cuda.mem_get_info(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": torch.cuda.get_device_name(self.device),
            "arch": getattr(properties, "gcnArchName", ""),
            "vram_bytes": self.total,
        }

    def sync(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def tensor(self):
        values = self.torch.arange(4096, dtype=self.torch.int32)
        if not self.torch.equal((values.to(self.device) * 3 + 1).cpu(), values * 3 + 1):
            raise Failed("wrong_result", "arithmetic on the GPU gave wrong integers")

    def hip_runtime(self):
        return {"loaded": loaded_libraries()}

    def pinned(self):
        values = self.torch.arange(MIB, dtype=self.torch.int32)
        host = values.pin_memory() if self.on_gpu else values
        back = self.torch.empty_like(host, pin_memory=self.on_gpu)
        there = host.to(self.device, non_blocking=True)
        self.sync()
        back.copy_(there, non_blocking=True)
        self.sync()
        if not self.torch.equal(back, values):
            raise Failed("wrong_result", "a pinned copy there and back changed bytes")

    def carom(self):
        self.engine = load_carom(self.root)
        return {"version": self.engine.__version__, "where": getattr(self.engine, "__file__", "")}

    def stream(self):
        """Four layers under a budget that holds three: the streamed output must equal the resident one."""
        import copy

        torch = self.torch
        seeded = torch.Generator().manual_seed(0)
        layers = [torch.nn.Linear(512, 512) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=seeded) / 16)
            x = torch.randn(8, 512, generator=seeded).to(self.device)
            resident = copy.deepcopy(model).to(self.device)(x)
            budget = 3 * (512 * 512 + 512) * 4
            for _ in range(2):
                try:
                    session = self.engine.stream(model, device=self.device, vram=budget, pool="torch")
                    break
                except Exception as error:  # BudgetError names the least budget that works
                    least = getattr(error, "least_bytes", None)
                    if not least or least <= budget:
                        raise
                    budget = least
            with session:
                for turn in (1, 2):  # the second uses what the first one learnt and kept
                    if not torch.equal(model(x), resident):
                        raise Failed(
                            "wrong_result", f"streamed layers differ from resident ones (pass {turn})"
                        )
            self.sync()
        return {"budget_bytes": budget}

    def aimdo_device(self):
        if not self.control.init_devices([0]):
            why = LOG[-1] if LOG else "it gave no reason"
            raise Failed("device_false", f"comfy_aimdo.control.init_devices([0]) returned False: {why}")

    def vbar(self):
        torch = self.torch
        pool = importlib.import_module("comfy_aimdo.model_vbar")
        bridge = importlib.import_module("comfy_aimdo.torch")
        bar = pool.ModelVBAR(64 * MIB, 0)
        try:
            handle = bar.alloc(MIB)
            signature = bar.fault(handle[1], handle[2])
            if signature is None:
                raise Failed(
                    "wrong_result", "the VBAR gave no memory for 1 MiB (is another program using the GPU?)"
                )
            pattern = (torch.arange(MIB, dtype=torch.int32) % 251).to(torch.uint8)
            view = bridge.aimdo_to_tensor(handle, self.device)
            view.copy_(pattern)
            same = torch.equal(view.cpu(), pattern)
            self.sync()
            del view  # no view may outlive the unpin
            bar.unpin(handle[1], handle[2])
            again = bar.fault(handle[1], handle[2])
            kept = again is not None and list(again) == list(signature)
            if again is not None:
                bar.unpin(handle[1], handle[2])
        finally:
            bar.close()
        if not same:
            raise Failed("wrong_result", "bytes written into the VBAR came back changed")
        return {"kept": kept}

    def address_space(self):
        """How many card-sized reservations fit: ROCm on Windows has about 256 GiB (comfy-aimdo 83).

        At most four, held together and freed once: many rounds of reserve and free are themselves
        a known fault (ROCm/rocm-systems 6191).
        """
        pool = importlib.import_module("comfy_aimdo.model_vbar")
        held: list = []
        try:
            while len(held) < 4:
                held.append(pool.ModelVBAR(self.total, 0))
                tell(step="address_space", state="progress", reserved_bytes=self.total * len(held))
        except MemoryError:
            pass
        finally:
            count = len(held)
            for bar in held:
                bar.close()
        if not count:
            raise Failed("address_space", "no GPU address space of the card's own size can be reserved")
        return {"reservations": count, "reserved_bytes": self.total * count}


def main() -> int:
    parser = argparse.ArgumentParser(description="Internal to rocm_setup.py.")
    parser.add_argument("--path", default="", help="a folder of staged packages, imported first")
    parser.add_argument("--carom", default="", help="checkout to use where Carom is not installed")
    parser.add_argument("--torch", default="", help="the torch version that must be imported")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    faulthandler.enable()
    logging.basicConfig(level=logging.DEBUG, handlers=[_Keep()])
    # The script's own folder may hold nothing the packages could mistake for theirs.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = ([options.path] if options.path else []) + [p for p in sys.path if p != here]
    proof = Proof(options.device, options.carom, options.torch)
    native = step("aimdo_init", proof.aimdo_init) if proof.on_gpu else False
    if (
        not step("torch", proof.import_torch)
        or not step("gpu", proof.gpu)
        or not step("tensor", proof.tensor)
    ):
        return 1
    step("hip_runtime", proof.hip_runtime)
    step("pinned", proof.pinned)
    if step("carom", proof.carom):
        step("stream", proof.stream)
    if native and step("aimdo_device", proof.aimdo_device) and step("vbar", proof.vbar):
        step("address_space", proof.address_space)
    tell(step="end", state="ok")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the verdict is told; a crash while native libraries unload would only blur it
