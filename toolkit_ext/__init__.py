"""The ai-toolkit backend: YAML `model: {offload: bouncing}`. Translates its calls to `carom.stream`, decides nothing.

`options` reads the YAML, `choose_mode` says what its mode comes down to on this device and `device_trial` finds that out, `budget_shares`
divides one budget among a job's models, `loading` keeps whole models on the host while they load, `attachment` is one model under
Carom, `job` all of one process, `log_messages` what the job's log says, `toolkit_patches` where ai-toolkit is joined, and `folder` the extension folder that `carom
install-ai-toolkit` puts in place.
"""

from __future__ import annotations


def install() -> None:
    """Join the running ai-toolkit; called by the extension folder. Idempotent.

    Raises UnsupportedError, before anything is changed, when this ai-toolkit lacks a seam.
    """
    from .toolkit_patches import install as join

    join()
