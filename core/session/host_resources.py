"""`HostResources`: the host memory of a session that is kept from one layout to the next."""

from __future__ import annotations

from ..device.engine import Engine
from ..host.arena import HostArena
from ..host.kept_pieces import KeptPieces
from ..host.shared_image import SharedImage
from ..host.spare_blocks import SpareBlocks
from ..placement.gather import Gather
from ..placement.host_copies import HostCopies
from ..placement.packed_tensor import PackedTensor, give_back
from ..placement.peer_memory import PeerMemory
from ..placement.shared_weights import RANK_BYTES


class HostResources:
    """A session's host memory: pinned blocks, host copies of units, and packed (losslessly compressed)
    weights.

    ``pins``: the limit that the host program sets on pinned bytes, None without one.
    ``arena``: allocates and pins blocks of host memory.
    ``spares``: pinned blocks for residents that will be put aside.
    ``shelf``: packed weights, by the id of the model's tensor.
    ``copies``: blocks with the bytes of units (groups of weights) that the next layout can use again.
    ``kept``: what the cache of weights from files held at the end of the last layout, for the next one.
    ``parks``: whether a program parks the session and uses it again later (`park(keep=True)`, `prepare_park`). Copies of
    weights that stay on the device are then kept in host memory.
    ``image``: the weights that the ranks of this machine share, None without a group.
    ``gather``: the all-gathers by which the ranks fetch units together, None if each fetches whole units.
    ``peers``: the memory of other devices in which units wait, None without ``peers=``.
    """

    def __init__(self, engine: Engine, ram: int, pins: int | None = None) -> None:
        self._pins = pins
        self.copies = HostCopies()
        self.kept = KeptPieces()
        self.parks = False
        self.shelf: dict[int, PackedTensor] = {}
        self.image: SharedImage | None = None
        self.gather: Gather | None = None
        self.peers: PeerMemory | None = None
        self.arena = HostArena(engine.pinner, ram)
        self.spares = SpareBlocks(self.arena)
        self.arena.reclaim = self._reclaim
        self._limit_pins(ram)

    def _limit_pins(self, ram: int) -> None:
        """Let the arena pin at most ``ram`` bytes, or what the host program allows if that is less."""
        if self._pins is not None and self._pins < ram:
            self.arena.begin_layout(self._pins, "the host program's limit of pinned memory")
        else:
            self.arena.begin_layout(ram)

    def _reclaim(self, nbytes: int) -> None:
        """Unpin memory that no streamed unit uses, until ``nbytes`` are unpinned or none is left."""
        self.copies.unpin_resident_copies(nbytes - self.spares.clear())

    def begin_layout(self, ram: int, notes: list[str]) -> None:
        """Let the next layout pin at most ``ram`` bytes, or fewer if a limit of pins allows fewer, and report ``notes``."""
        self.kept.set_budget(min(ram, self.kept.budget))
        self.spares.clear()
        self._limit_pins(ram)
        self.arena.notes += notes

    def own_ram(self, ram: int) -> int:
        """Return the bytes of ``ram`` that are this process's own: all of them, or without what ranks share."""
        return ram if self.image is None else min(ram, RANK_BYTES)

    def unpack_trained(self, engine: Engine) -> None:
        """Give the packed weights that require gradients their plain bytes back. Called while no layout is in effect."""
        if any(packed.tensor.requires_grad for packed in self.shelf.values()):
            self.copies.clear()  # they hold the packed bytes too
            give_back(self.shelf, engine.move, lambda tensor: tensor.requires_grad)

    @property
    def packs(self) -> bool:
        """Whether any weight is stored packed in host memory."""
        return bool(self.shelf) or self.copies.packs
