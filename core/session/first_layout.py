"""`lay_out_first`: binds a new session's weights to their source, and makes the session's first layout.

A layout assigns each weight of the module to device memory, or to host memory or a file from which it is streamed. With
a process group, all ranks take these steps together, and a failure of one rank is raised on all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from ..common.errors import BudgetError
from ..host.node_group import NodeGroup, together
from ..host.shared_image import SharedImage
from . import gathering, peering, settings
from .assembly import Parts
from .stream_settings import StreamSettings


def lay_out_first(made: Parts, asked: StreamSettings, node: NodeGroup | None) -> None:
    """Make the first layout of a session with the parts ``made``, and begin the policies that change layouts.

    ``asked``: checked settings. ``node``: the ranks of this machine, None without a group. Raises as `carom.stream` does.
    The caller undoes what was done until then.
    """
    manager, managed = made.manager, made.manager.module
    made.memory.begin(asked.vram == "auto" or made.ledger.shared is not None)
    peering.begin(made, asked.peers)
    keep_packed = asked.codec == "auto" and made.engine.decodes_files and not manager.uses_vbars
    together(
        node,
        "carom.stream, binding weights,",
        lambda: managed.bind(asked.weights, made.engine, keep_packed),
    )
    if node is not None:
        _share(made, node, asked.ram)
        managed.note(gathering.begin(made, node))
    follows = asked.ram == "auto" and node is None
    made.host_memory.begin(follows)
    together(node, "carom.stream, the first layout,", lambda: _attach(made, asked.vram))
    if node is not None and manager.host.gather is not None:
        gathering.require_equal(node, manager.layout)
    if asked.weights is None and managed.checkpoint is not None:  # the weights moved to disk
        made.host_memory.begin(follows)


def _share(made: Parts, node: NodeGroup, asked_ram: int | str) -> None:
    """Move the weights of a session that has no layout yet to memory that the ranks of ``node`` share.

    All ranks use the smallest of their RAM budgets. An automatic budget was measured while each rank had a copy of
    its own, and allows at least what is shared now, as that is in memory anyway. Raises as `share_memory` and
    `share_files` do.
    """
    manager = made.manager
    ram = min(node.exchange(manager.wanted.ram, "comparing RAM budgets"))
    manager.wanted = dataclasses.replace(manager.wanted, ram=ram)
    manager.host.image = SharedImage()
    manager.module.share(node, ram, manager.host.image)
    if asked_ram == "auto":
        manager.wanted = dataclasses.replace(manager.wanted, ram=max(ram, manager.host.image.nbytes))
    manager.host.begin_layout(manager.wanted.ram, [])


def _attach(made: Parts, vram: Any) -> None:
    """Make the first layout.

    If an automatic or shared budget does not suffice, the session begins with the smallest budget that works.
    ``vram``: as in `carom.stream`. Raises BudgetError if the smallest budget is not available either, or if a
    fixed budget is too small.
    """
    ledger, manager, shared = made.ledger, made.manager, made.ledger.shared
    had = 0 if shared is None else shared.nbytes
    # Other new sessions wait until this session has its layout, and get memory afterwards. Running sessions
    # do not wait: the bytes that this session is about to take are reserved in the ledger by a promise.
    # `coming` is released last: the next new session asks this one to give way, and only tries its layout lock.
    with contextlib.ExitStack() as others_wait, manager.lock:
        others_wait.enter_context(ledger.coming(shared))
        with ledger.growing():
            _lay_out(made, vram, had)


def _lay_out(made: Parts, vram: Any, had: int) -> None:
    """Make the first layout, under the locks of `_attach`. ``had``: bytes of the shared budget before."""
    ledger, manager, shared = made.ledger, made.manager, made.ledger.shared
    try:
        with ledger.taking():
            if shared is not None:
                _budget_now(made, vram)
            if ledger.governor is not None and ledger.make_room(ledger.vram):
                _budget_now(made, vram)
            ledger.promise(0 if shared is None else ledger.vram)
        manager.attach(manager.present())
    except BudgetError as error:
        # The bytes that activations need are not known yet. Begin with the smallest budget, if it is
        # available.
        least = error.least_bytes or 0
        if (vram != "auto" and shared is None) or not least:
            raise
        with ledger.taking():
            ledger.promise(0)
            ledger.begin_with_least(least, had, error)
        manager.attach(manager.present())
    finally:
        ledger.promise(0)


def _budget_now(made: Parts, vram: Any) -> None:
    """Set the VRAM budget to the number of bytes that ``vram`` (a percentage, for example) amounts to at this
    moment.
    """
    waiting, manager = made.weights.waiting_bytes or 0, made.manager
    budget, note = settings.within_dedicated(
        settings.vram_budget(vram, made.engine, waiting=waiting), made.engine, waiting
    )
    made.ledger.set(budget)
    manager.wanted = dataclasses.replace(manager.wanted, note=note)
