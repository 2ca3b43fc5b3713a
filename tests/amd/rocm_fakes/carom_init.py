"""A Carom whose stream is exact unless CAROM_FAKE says otherwise; see torch_init.py."""

import contextlib
import os

__version__ = "0.1.0"
calls = []


class BudgetError(Exception):
    least_bytes = 4 << 20


@contextlib.contextmanager
def stream(model, *, device, vram, pool):
    calls.append(vram)
    plain = type(model).__call__
    if os.environ.get("CAROM_FAKE") == "wrong_stream":
        type(model).__call__ = lambda self, x: x * 3
    try:
        yield
    finally:
        type(model).__call__ = plain


if os.environ.get("CAROM_FAKE") == "no_stream":
    del stream
if os.environ.get("CAROM_FAKE") == "budget":
    exact = stream

    def stream(model, *, device, vram, pool):
        if vram < BudgetError.least_bytes:
            raise BudgetError("too small")
        return exact(model, device=device, vram=vram, pool=pool)
