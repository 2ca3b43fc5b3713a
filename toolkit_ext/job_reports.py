"""`JobReports`: the line of progress in the job's log, and the reports and pictures in the job's output folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.common.held_files import write_atomically
from ..core.metrics.report import Report
from . import log_messages
from .attachment import Attachment
from .options import Policy


class JobReports:
    """The last report of each model of a job, also of models that are no longer managed.

    ``policy``: the settings from the YAML; ``attachments``: the job's models, a list that the job changes; ``say``:
    prints a line into the job's log; ``told``: whether the job's log has a line of progress.
    """

    def __init__(self, policy: Policy, attachments: Sequence[Attachment], say: Callable[[str], None]) -> None:
        self._policy, self._attachments, self._say = policy, attachments, say
        self._reports: dict[str, Report] = {}
        self.told = False

    def keep(self, attachment: Attachment) -> None:
        """Keep the report of the present session of ``attachment``, for the time after the session."""
        if attachment.session is None:
            return
        now, before = attachment.session.report(), self.of(attachment.name)
        if before is not None and before.kind == "train" and now.kind != "train":
            # A job ends with samples, but its report is about training steps. The peaks are those of all sessions.
            peaks = ("vram_peak_bytes", "pinned_peak_bytes", "ram_peak_bytes")
            peak = {name: max(getattr(before, name), getattr(now, name)) for name in peaks}
            now = dataclasses.replace(before, **peak)
        self._reports[attachment.name] = now

    def of(self, name: str) -> Report | None:
        """Return the kept report of the model ``name``, None if there is none."""
        return self._reports.get(name)

    def progress(self, step: int | None) -> None:
        """Print the line about ``step`` into the job's log, with each model's residency and stall."""
        lines = []
        for attachment in self._attachments:
            self.keep(attachment)
            session = attachment.session
            if session is not None:
                report = self._reports[attachment.name]
                lines.append(log_messages.progress(attachment.name, report, parked=session.parked))
        if lines:
            self.told = True
            self._say(f"step {step}: " + "; ".join(lines))

    def write(
        self, folder: str | os.PathLike[str], job: str, *, pictures: bool, kept: bool = False
    ) -> Path | None:
        """Write the report, and with ``pictures`` timelines and traces of models that stream, to the job's output ``folder``.

        ``kept``: whether the present reports are kept already, as after `progress`. A report waits for the device.
        Returns the folder of the written files, None if nothing was written. A failure, such as a full disk, is printed
        into the job's log and raises nothing.
        """
        for attachment in () if kept else self._attachments:
            self.keep(attachment)
        if not self._reports:
            return None
        try:
            target = Path(folder) / output_name(job)
            target.mkdir(parents=True, exist_ok=True)
            reports = {name: report.to_dict() for name, report in self._reports.items()}
            policy: dict[str, Any] = {"offload": self._policy.mode}
            policy |= {name: getattr(self._policy, name) for name in ("vram", "ram", "disk")}
            _write(target / "report.json", json.dumps({**policy, "models": reports}, indent=2))
            _write(
                target / "report.txt",
                "\n\n".join(f"{name}\n{r.table()}" for name, r in self._reports.items()) + "\n",
            )
            if pictures:
                for name, report in self._reports.items():
                    if not report.streamed_bytes:
                        continue  # nothing crossed; importing matplotlib and drawing take one to two seconds
                    stem = name.replace(" ", "-")
                    report.plot(target / f"timeline-{stem}.png")
                    report.trace(target / f"trace-{stem}.json")
        except (OSError, ValueError, ImportError) as error:
            self._say(f"the report could not be written ({error})")
            return None
        return target


def output_name(job: str) -> str:
    """Return the name of the folder for the reports, which must not start with the job's name.

    ai-toolkit treats every name that starts with the job's name as a checkpoint.
    """
    return "carom" if not "carom".startswith(job) else f"offload of {job}"


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))
