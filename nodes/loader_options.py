"""Access to the model files and the options that ComfyUI's own loader nodes offer."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from ..core.common.commit_memory import is_commit_limit, with_advice
from ..core.common.errors import CaromError, WeightsError


def stock_node(name: str) -> Any:
    """Return ComfyUI's own node class ``name``."""
    return importlib.import_module("nodes").NODE_CLASS_MAPPINGS[name]  # ComfyUI's module, not this package


def stock_options(node: str, widget: str) -> list[str]:
    """Return the options that ComfyUI's own loader ``node`` offers for ``widget``. Carom's nodes offer the same."""
    inputs = stock_node(node).INPUT_TYPES()
    for group in ("required", "optional"):
        if widget in inputs.get(group, {}):
            choices = inputs[group][widget]
            found = choices[0] if isinstance(choices[0], list) else choices[1].get("options", [])
            return list(found)
    return []


def file_names(folder: str) -> list[str]:
    """Return the names of the files in ComfyUI's folders of the kind ``folder`` (such as "checkpoints")."""
    import folder_paths  # type: ignore[import-not-found]

    return list(folder_paths.get_filename_list(folder))


def path_of(folder: str, name: str) -> str:
    """Return the path of a file that `file_names` lists. Raises WeightsError if the file no longer exists."""
    import folder_paths

    found = folder_paths.get_full_path(folder, name)
    if found is None:
        raise WeightsError(
            f"{name!r} is not in ComfyUI's {folder} folders (any more); put it there, press R on the page, and choose again"
        )
    return found


def file_state(folder: str, *names: str) -> list[tuple[int, ...]]:
    """Return a value that changes if one of the files ``names`` is replaced or written to.

    ComfyUI runs a node again whose value changed. A loaded model is otherwise cached by the names of its files.
    """
    import folder_paths

    found: list[tuple[int, ...]] = []
    for name in names:
        path = folder_paths.get_full_path(folder, name)
        try:
            state = os.stat(path or "")
        except OSError:  # running the node reports the error
            found.append(())
        else:
            found.append((state.st_size, state.st_mtime_ns, state.st_ino))
    return found


def embedding_folders() -> Any:
    """Return ComfyUI's folders of textual inversion embeddings."""
    import folder_paths

    return folder_paths.get_folder_paths("embeddings")


def loaded(name: str, load: Callable[[], Any]) -> Any:
    """Call ``load`` and return its result.

    Raises WeightsError that names the file ``name`` if ``load`` fails or returns None. CaromError, MemoryError and
    ComfyUI's interrupt pass through unchanged.
    """
    try:
        result = load()
    except (CaromError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "InterruptProcessingException":
            raise
        message = f"{name!r} could not be loaded: {type(error).__name__}: {error}"
        if is_commit_limit(error):
            raise WeightsError(with_advice(message, error)) from error
        raise WeightsError(
            f"{message}; check that the file is complete and of the kind this loader is for"
        ) from error
    if result is None:
        raise WeightsError(f"{name!r} holds no model that ComfyUI knows")
    return result


def dtype_options(weight_dtype: str) -> dict[str, Any]:
    """Return ComfyUI's model options for ``weight_dtype``, one of ComfyUI's names such as "fp8_e4m3fn_fast".

    Raises ValueError for a name that stands for no dtype.
    """
    if weight_dtype == "default":
        return {}
    name = weight_dtype.removesuffix("_fast")
    dtype = getattr(torch, name.replace("fp8_", "float8_") if name.startswith("fp8_") else name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"weight_dtype={weight_dtype!r} is unknown here; use default")
    options: dict[str, Any] = {"dtype": dtype}
    if weight_dtype.endswith("_fast"):
        options["fp8_optimizations"] = True
    return options
