"""The process that runs the prompts of `prompts` in ComfyUI, without its server: ``python prompt_host.py JOB_JSON``.

ComfyUI starts as by its main.py, with dynamic VRAM where main.py would choose it. Its own PromptExecutor runs the graphs,
with its caches. The process prints a line of JSON when it is ready and for each prompt, and waits for a line on stdin
before each prompt. A prompt that is null drops all models. ``interrupts`` of the job names prompts, by number, that are
interrupted when a part begins. ``fills`` names prompts in which another program takes bytes of the imagined card when a
part begins, until the prompt ends.
"""

# mypy: ignore-errors
from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = {"diffusion_models": "models", "text_encoders": "text", "vae": "vae", "loras": "loras"}
MARK = "@@"  # before each line of JSON
MEMORY_EVERY_S = 0.02
COPIES = {"HtoD": "to_device", "DtoH": "from_device"}


class Errors(logging.Handler):
    """Collects the lines with which ComfyUI's adapters report a weight whose patch they left out."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("ERROR ") or "Calculate Weight Failed" in text:
            self.lines.append(text)


class FixedIds:
    """A tokenizer without vocabulary: ids by the hash of the text. The same for stock and Carom."""

    def __init__(self, count, vocabulary):
        self._count, self._vocabulary = count, vocabulary

    def tokenize_with_weights(self, text, return_word_ids=False, **_):
        ids = []
        for at in range(self._count - 1):
            digest = hashlib.sha256(f"{text}/{at}".encode()).digest()
            ids.append((2 + int.from_bytes(digest[:4], "little") % (self._vocabulary - 2), 1.0))
        return {"t5xxl": [[*ids, (1, 1.0)]]}

    def state_dict(self):
        return {}


class Server:
    """Stands in for ComfyUI's server, to which no page is connected."""

    client_id = last_node_id = last_prompt_id = None

    def send_sync(self, *_):
        pass

    send_progress_text = send_sync


class MemoryPeaks(threading.Thread):
    """Samples the memory of this process: peaks of each kind since the last `take`, and of their sum."""

    def __init__(self, memory_of):
        super().__init__(daemon=True)
        self._memory_of, self._peaks = memory_of, {}
        self.start()

    def run(self):
        while True:
            self._sample()
            time.sleep(MEMORY_EVERY_S)

    def _sample(self):
        now = dict(self._memory_of(os.getpid()))
        now.pop("resident_bytes", None)  # with pages of mapped files, which the system can take back
        now["sum_bytes"] = sum(now.values())
        for key, value in now.items():
            self._peaks[key] = max(self._peaks.get(key, 0), value)

    def take(self):
        self._sample()
        found, self._peaks = dict(self._peaks), {}
        return found


def main(job: dict) -> None:
    sys.path.insert(0, str(HERE))
    errors = start_comfyui(job)
    import execution
    import prompt_clock
    import prompt_nodes
    import torch
    from process import io_of, memory_of

    import nodes

    set_paths(job)
    nodes.NODE_CLASS_MAPPINGS.update(prompt_nodes.NODES)
    streaming = start_carom() if job["carom"] else None
    card = counts = None
    if job.get("card"):
        prompt_counts = importlib.import_module("prompt_counts")
        card = prompt_counts.imagine_card(job["card"])
        counts = prompt_counts.Counts() if job["carom"] else None
    clock = prompt_clock.Clock()
    note_parts(clock)
    alarms = {
        int(number): (part, nodes.interrupt_processing) for number, part in job.get("interrupts", {}).items()
    }
    for number, (part, nbytes) in job.get("fills", {}).items():
        alarms[int(number)] = part, functools.partial(setattr, card, "others", nbytes)
    sampler = prompt_clock.StackSampler(clock) if job["profile"] else None
    executor = make_executor(execution)
    peaks = MemoryPeaks(memory_of)
    on_gpu = not job["cpu"]
    if on_gpu:
        torch.empty(1, device="cuda")  # the context, before the first prompt
    tell({"ready": True})
    for number, prompt in enumerate(job["graphs"]):
        if not sys.stdin.readline():
            return
        if prompt is None:
            forget_models(executor)
            continue
        prompt_nodes.told.clear()
        errors.lines.clear()
        peaks.take()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, began = io_of(os.getpid()), time.perf_counter()
        if counts is not None:
            counts.take()
        with link_bytes(job["link"]) as link:
            clock.start()
            clock.alarm = alarms.get(number, (None, None))
            executor.execute(prompt, f"prompt-{number}", {}, ["tell"])
            parts = clock.seconds()
        if card is not None:
            card.others = 0
        after = io_of(os.getpid())
        found = {
            "prompt": number, "wall_s": round(sum(parts.values()), 4), "parts_s": parts,
            "took_s": round(time.perf_counter() - began, 4),
            "read_bytes": {key: after[key] - before[key] for key in after},
            "link_bytes": link or None, "memory": peaks.take(), "results": dict(prompt_nodes.told),
            "errors": errors.lines[:], "torch_peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
            "host_pinned_bytes": pinned_bytes(),
        }  # fmt: skip
        if not executor.success:
            found |= failure(executor)
        if streaming is not None:
            found["carom"] = carom_figures(streaming)
        if counts is not None:
            found["counts"] = counts.take()
        if sampler is not None:
            with open(job["profile"], "a", encoding="utf-8") as file:
                file.write(f"#### prompt {number}: {found['wall_s']} s, {parts}\n{sampler.text()}\n\n")
        tell(found)
        gc.collect()  # as the server's loop does between prompts
        importlib.import_module("comfy.model_management").soft_empty_cache()
    if sampler is not None:
        sampler.stop()  # a timer signal would end the process while Python exits


def forget_models(executor):
    """Drop all results and models, as the server does for /free."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    executor.reset()
    gc.collect()
    comfy.model_management.soft_empty_cache()


def limit_seen_memory(nbytes):
    """Make psutil report a machine of ``nbytes`` bytes of memory, as one of that size would; it knows no control group."""
    import psutil
    from process import memory_of

    own = psutil.virtual_memory

    def virtual_memory():
        found, held = own(), dict(memory_of(os.getpid()))
        left = nbytes - held.get("anonymous_bytes", 0) - held.get("shared_bytes", 0)
        return found._replace(total=min(found.total, nbytes), available=max(0, min(found.available, left)))

    psutil.virtual_memory = virtual_memory


def tell(found):
    """Print ``found`` as a line of JSON, after the end of a line that a progress bar may have begun."""
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


def start_comfyui(job):
    """Import ComfyUI as its main.py does; return the collector of error lines."""
    sys.argv = ["main.py", *(["--cpu"] if job["cpu"] else [])]
    sys.path.insert(0, job["comfyui"])
    if job.get("ram"):
        limit_seen_memory(job["ram"])
    os.chdir(job["comfyui"])
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfy.cli_args import args, enables_dynamic_vram

    errors = Errors()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    logging.getLogger().addHandler(errors)
    if not job["cpu"]:
        importlib.import_module("cuda_malloc")  # chooses torch's allocator
    module = sys.modules["server"] = types.ModuleType("server")
    module.PromptServer = types.SimpleNamespace(instance=Server())
    control = importlib.import_module("comfy_aimdo.control")
    if enables_dynamic_vram():
        control.init(simple_vram_headroom=None, nvml_pressure=not args.disable_nvml_pressure)
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    if enables_dynamic_vram():
        devices = [device.index for device in comfy.model_management.get_all_torch_devices()]
        headroom = int(args.vram_headroom * 1024**3)
        if control.init_devices((index, headroom) for index in devices):
            # As main.py does. Without a level comfy-aimdo calls Python's logging at each allocation on the device: while
            # torch's allocator holds its lock (a deadlock with a thread that has the GIL and asks for memory_stats), and
            # when tensors are freed at exit, after the ctypes callback was freed (a segmentation fault).
            control.set_log_info()
            comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
            comfy.memory_management.aimdo_enabled = True
    print(f"dynamic VRAM: {comfy.memory_management.aimdo_enabled}", flush=True)
    return errors


def set_paths(job):
    """Name the folders of the files to ComfyUI, replace the tokenizer, and give T5 the sizes of its file."""
    import comfy.sd
    import comfy.text_encoders.genmo
    import folder_paths

    for kind, folder in FOLDERS.items():
        folder_paths.add_model_folder_path(kind, str(Path(job["files"]) / folder), is_default=True)
    sizes = job["sizes"]
    text = dict(sizes["text"])
    comfy.text_encoders.genmo.MochiT5Tokenizer = lambda **_: FixedIds(
        sizes["tokens"], text.get("vocab_size", 32128)
    )
    if text:
        load = comfy.sd.load_clip

        def load_clip(*arguments, model_options=None, **options):
            options["model_options"] = {**(model_options or {}), "t5xxl_model_config": text}
            return load(*arguments, **options)

        comfy.sd.load_clip = load_clip


def start_carom():
    """Register Carom's nodes as ComfyUI does; return the module that knows the streamed models."""
    sys.path.insert(0, str(HERE.parent / "engines"))
    launch = importlib.import_module("launch")
    sys.path.pop(0)  # its modules could shadow others
    launch.load_checkout()
    import nodes

    for node in importlib.import_module("carom.nodes.extension").NODES:
        nodes.NODE_CLASS_MAPPINGS[node.GET_SCHEMA().node_id] = node
    return importlib.import_module("carom.nodes.shared_ram")


def make_executor(execution):
    """Return an executor with the caches that main.py chooses by default."""
    import comfy.model_management

    total = comfy.model_management.total_ram
    ram = min(10.0, max(2.0, total * 0.10 / 1024.0))
    arguments = {"lru": 0, "ram": ram, "ram_inactive": min(128.0, total / 1024.0)}
    return execution.PromptExecutor(
        Server(), cache_type=execution.CacheType.RAM_PRESSURE, cache_args=arguments
    )


def note_parts(clock):
    """Change the clock's part where ComfyUI begins a node, a model its first step, and a sampler its second step."""
    import comfy.model_base
    import comfy.model_management
    import execution
    import latent_preview

    run_node, prepare = execution.get_output_data, latent_preview.prepare_callback
    apply = comfy.model_base.BaseModel.apply_model

    async def noted(prompt_id, unique_id, obj, *arguments, **options):
        clock.enter(part_of(obj if isinstance(obj, type) else type(obj)))
        try:
            return await run_node(prompt_id, unique_id, obj, *arguments, **options)
        finally:
            clock.enter("rest")

    def prepared(*arguments, **options):
        inner = prepare(*arguments, **options)

        def callback(step, *more):
            inner(step, *more)
            if clock.part == "first step":
                synchronize()
                clock.enter("other steps")

        return callback

    def applied(*arguments, **options):
        if clock.part == "switch":
            clock.enter("first step")
        return apply(*arguments, **options)

    def synchronize():
        device = comfy.model_management.get_torch_device()
        if device.type == "cuda":
            importlib.import_module("torch").cuda.synchronize(device)

    execution.get_output_data, latent_preview.prepare_callback = noted, prepared
    comfy.model_base.BaseModel.apply_model = applied


def part_of(node):
    """Return the part that begins with a node of class ``node``."""
    name = getattr(node, "__name__", "")
    if name.startswith("KSampler"):
        return "switch"
    if name in ("CLIPTextEncode", "VAEDecode"):
        return {"CLIPTextEncode": "encode", "VAEDecode": "decode"}[name]
    if name in ("Tell", "Latent", "Part"):
        return "measure"
    return "load" if "Load" in name or "Offload" in name else "rest"


@contextlib.contextmanager
def link_bytes(counts):
    """Context whose dict has the bytes of the copies over the link by direction at the end, as CUPTI records them."""
    found = {}
    if not counts:
        yield found
        return
    import torch

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    try:
        yield found
    finally:
        torch.cuda.synchronize()
        profiler.stop()
        path = Path(tempfile.gettempdir()) / f"carom-link-{os.getpid()}.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
        path.unlink()
        found.update(dict.fromkeys(COPIES.values(), 0))
        for event in events:
            if event.get("cat") == "gpu_memcpy":
                for word, key in COPIES.items():
                    if word in event["name"]:
                        found[key] += event["args"].get("bytes", 0)


def pinned_bytes():
    import comfy.model_management

    return int(getattr(comfy.model_management, "TOTAL_PINNED_MEMORY", 0))


def failure(executor):
    """Return ``failed``, the error of the last prompt, or ``interrupted``, the node in which it was interrupted."""
    for kind, told in executor.status_messages:
        if kind == "execution_interrupted":
            return {"interrupted": told["node_type"]}
        if kind == "execution_error":
            print("".join(told["traceback"]), flush=True)
            return {"failed": f"{told['node_type']}: {told['exception_message'].strip()}"}
    return {"failed": "the prompt ended without a message"}


def carom_figures(shared_ram):
    """Return the reports of the streamed models that are open, as far as they have any."""
    found = []
    for streaming in list(shared_ram.all_models):
        try:
            report = streaming.report()
            told = {} if report is None else report.to_dict()
        except Exception as error:
            told = {"failed": f"{type(error).__name__}: {error}"}
        told = {key: value for key, value in told.items() if isinstance(value, (int, float, str))}
        model = streaming.model
        found.append(
            {
                "model": type(model).__name__,
                "suspended": streaming.suspended,
                "budget": streaming.budget,
                "report": told,
            }
        )
    return found


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
