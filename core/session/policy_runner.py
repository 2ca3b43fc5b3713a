"""`PolicyRunner`: asks a session's policies between steps, in order, and makes the first layout that a policy
requests.

A policy (policies/policy.py) is an object that decides whether another layout is wanted. A layout assigns
each weight to device memory, or to host memory or a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from .device_weights import DeviceWeights
from .layout_manager import LayoutManager
from .policies.device_memory import DeviceMemory
from .policies.policy import Observation, Policy, clock_of


class PolicyRunner:
    """Asks policies between steps. As long as no policy is due, a step costs one comparison.

    ``at``: the number of measured steps after which `look` has to be called.
    """

    def __init__(
        self, manager: LayoutManager, weights: DeviceWeights, memory: DeviceMemory, policies: Sequence[Policy]
    ) -> None:
        self._manager, self._weights, self._memory = manager, weights, memory
        self._policies = policies
        self.at: float = 0

    def stop(self) -> None:
        """Ask no policy from now on."""
        self._policies = ()

    def plan_next(self) -> None:
        """Compute the step at which `look` has to be called next. Called after a policy was started, stopped
        or asked.
        """
        settled = self._manager.layout.meter.settled
        self.at = min((policy.next_step(settled) for policy in self._policies), default=math.inf)

    def look(self) -> None:
        """Ask the policies that are due, and change to the first layout that a policy requests."""
        manager = self._manager
        if not self._weights.movable:
            self.at = math.inf
            return
        clock = clock_of(manager)
        due = [policy for policy in self._policies if policy.due(clock)]
        with manager.lock, contextlib.ExitStack() as locks:
            if self._memory in due:
                if self._memory.urgent:
                    locks.enter_context(manager.ledger.growing())
                elif not manager.ledger.may_grow(locks):
                    # Another session is moving gigabytes of weights, and holds the lock. Skip this policy
                    # instead of waiting.
                    due.remove(self._memory)
            seen = Observation(manager, clock)
            for policy in due:
                seen.wanted = (
                    manager.present()
                )  # a previous policy may have changed the budget without a new layout
                wanted = policy.decide(seen)
                if wanted is None:
                    continue
                try:
                    outcome = manager.change(wanted, policy.fallback)
                except BaseException:  # the session is parked: restore the RAM budget that worked before
                    manager.wanted = dataclasses.replace(manager.wanted, ram=seen.wanted.ram)
                    raise
                policy.took(outcome)
                break
        self.plan_next()
