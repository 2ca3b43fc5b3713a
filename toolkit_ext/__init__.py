"""The ai-toolkit backend, for a YAML with `model: {offload: bouncing}`. Maps ai-toolkit's calls to Carom sessions.

- `options` reads the YAML.
- `choose_mode` decides how the requested mode runs on the job's device, and `device_trial` tries the device out.
- `budget_shares` checks that a job's models fit one budget.
- `loading` keeps whole models on the host while they load.
- `spilled_loading` moves weights to disk while models load.
- `freed_memory` makes the C allocator give freed memory back.
- `attachment` manages one model, and `job` all models of one process of a job. `job_sessions` divides the job's budgets
  among the models, and `job_reports` writes the job's reports.
- `log_messages` writes the lines for the job's log.
- `toolkit_patches` patches ai-toolkit's classes.
"""

from __future__ import annotations


def install() -> None:
    """Patch the running ai-toolkit. Idempotent. The extension folder of `carom install-ai-toolkit` calls this function.

    Raises UnsupportedError, before any change, if this ai-toolkit lacks a class or method that is patched.
    """
    from .toolkit_patches import install as join

    join()
