"""Deliberate defects for run.py: in each, one place of one source file is changed.

``old`` occurs exactly once in the file. ``equivalent`` says why a change makes no difference that a test could see.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    idea: str
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.idea}"


def _of(file: str, *changes: tuple[str, ...]) -> list[Mutant]:
    return [Mutant(file, *change) for change in changes]


MUTANTS: list[Mutant] = [
    # -- core: runs, backward passes, slots
    *_of(
        "core/streaming/run.py",
        (
            "if self.held or streamer.backward.has_uses:",
            "if False:",
            "uses that are over are not ended at the next one",
        ),
        (
            "            self.pool.abandon(_get_thread())\n            raise\n",
            "            raise\n",
            "no wait where an event after a read could not be recorded",
        ),
        (
            "held = slot.views.kept_elsewhere() and slot.views.kept_by_model(slot.unit)",
            "held = False",
            "a slot whose view is kept may be overwritten",
        ),
        (
            "target, now.after, streamer.transfer",
            "target, (), streamer.transfer",
            "a copy does not wait for the last reads of its place",
        ),
        (
            "if streamer.awaiting_optimizer and unit.backing.trainable:",
            "if False:",
            "weights that are about to be stepped are brought ahead",
        ),
        ("if not store.ready(unit.backing):", "if False:", "what is not read yet is brought ahead"),
        (
            "        if _get_thread() in self.issuing:\n            return",
            "        if False:\n            return",
            "a use that ends while a copy is issued issues another one",
        ),
        (
            "if due and due[0] == number:",
            "if True:",
            "a use during a copy leaves the wrong fetches due",
        ),
        (
            "            return self._fault(unit, user)\n",
            "            pass\n",
            "a thread that waited beside an interrupt reads what was given up",
        ),
        (
            "            self.end((unit, slot, user, False))\n            raise",
            "            raise",
            "a run that failed at its beginning is not left",
        ),
    ),
    *_of(
        "core/streaming/streamer.py",
        (
            "the allocator reuses memory.\n        self.engine.synchronize()",
            "the allocator reuses memory.",
            "no wait between making the staging memory and the first copy",
        ),
        (
            "                self.engine.synchronize(slot.now.copied)\n",
            "                pass\n",
            "an optimizer steps weights that are being copied",
            "what arrives is given up unread, and brought again in another version",
        ),
        ("state[name] = home.value()", "pass", "a state dict taken in a forward keeps views of slots"),
        (
            "            try:\n                self.engine.synchronize()\n            except Exception:",
            "            try:\n                pass\n            except Exception:",
            "close does not wait for the device",
        ),
        (
            "            self.slot_waiters.slot_freed()  # waiting",
            "            pass  # waiting",
            "close does not wake who waits",
        ),
        ("            self._gradient_buffers.close()\n", "", "closed: the gradients' buffers stay pinned"),
        (
            "            self.forwards.restore_modules()\n            self.backward.forget()\n            self._",
            "            self.backward.forget()\n            self._",
            "closed during a run: views of slots stay in the modules",
        ),
        (
            "            self.pool.abandon(_get_thread())  # threads",
            "            pass  # threads",
            "interrupted: threads that wait for room are not told",
        ),
        (
            "return any(unit.in_graphs for unit in self.units)",
            "return False",
            "weights move though a graph wants them",
        ),
    ),
    *_of(
        "core/streaming/forwards.py",
        (
            "                streamer.awaiting_optimizer = False\n",
            "                pass\n",
            "after a step of all weights nothing is prefetched",
        ),
        (
            "return bool(self.entered or self.roots)",
            "return bool(self.entered)",
            "another thread's root forward is not seen",
        ),
        ("            streamer.meter.forward_failed()\n", "", "a failed forward counts as a step"),
        (
            "while len(mine.entered) > entered:",
            "while False:",
            "a run that was not left is not cleaned up",
            "only code that resumes a forward after its root has ended leaves runs to clean up",
        ),
        (
            "                unit.hide()\n            unit.depth = 0\n",
            "                pass\n            unit.depth = 0\n",
            "interrupted: views of slots stay in the modules",
        ),
        ("        mine.entered.clear()\n", "", "interrupted: the thread seems to run a unit for ever"),
        (
            "                    operators.remove(slot)\n",
            "                    pass\n",
            "a thread counts slots that it used once as its own",
        ),
        (
            "self._streamer.engine.synchronize(self._streamer.engine.copy_out(now, view.detach()))",
            "self._streamer.engine.copy_out(now, view.detach())",
            "what a forward wrote is read before it is on the host",
        ),
        (
            "            self._streamer.keep_version(slot)\n",
            "            pass\n",
            "after a write the slot is brought again",
            "the host's version was raised by the value that is kept: the slot is brought again, which is slower and right",
        ),
    ),
    *_of(
        "core/streaming/backward.py",
        (
            "            self._gradient_buffers.forget(task)\n",
            "",
            "each failed backward keeps pinned buffers",
        ),
        (
            "                return\n            self._close_pass(task)\n",
            "                return\n            self._tasks.pop(task, None)\n",
            "a failed backward keeps its slots in use",
        ),
        (
            "                    streamer.evict_trainable()\n",
            "                    pass\n",
            "weights are kept in slots while they are stepped",
        ),
        (
            "self._ending_uses.append(self._current_uses.pop(thread))",
            "self._current_uses.pop(thread)",
            "the last slot of a backward stays in use",
        ),
        (
            "        self._streamer.run.end_finished_uses()\n",
            "",
            "at the end of a backward nothing is given back",
            "the next use of any slot ends them; until then nobody asks",
        ),
        (
            "            use.views.append(weakref.ref(view))\n",
            "",
            "a slot is given up while autograd holds a view of it",
            "a slot whose storage somebody still uses is held at its release anyway, where uses are counted",
        ),
        (
            "any(thread != mine and task != present for task, thread in self._tasks.items())",
            "False",
            "another thread's backward is not seen",
        ),
        (
            "        self._current_uses.clear()\n        self._ending_uses.clear()\n",
            "        pass\n",
            "interrupted: slots of a backward stay in use",
        ),
    ),
    *_of(
        "core/streaming/gradients.py",
        (
            "            self._engine.synchronize(event)\n",
            "            pass\n",
            "gradients are added up before they are there",
        ),
        ("        self._arena.pin(block)\n", "", "gradients land in pageable memory"),
        (
            "            block.unpin()\n",
            "            pass\n",
            "the buffers of gradients stay pinned after the end",
        ),
        ("show_host_tensors(False)\n", "pass\n", "after a hook the thread sees host tensors in its passes"),
    ),
    *_of(
        "core/streaming/unit.py",
        (
            "self.uses + len(self.saved) * _uses_of_a_view() if self.saved else self.uses",
            "self.uses",
            "a slot that autograd read counts as kept for ever",
        ),
        (
            "use_count(storage._cdata) + sys.getrefcount(storage) > own",
            "False",
            "a kept view of a slot is not noticed",
        ),
        (
            "return list(map(_address, self.tensors)) != self.addresses",
            "return False",
            "data replaced in a run is lost",
        ),
    ),
    *_of(
        "core/device/stream_engine.py",
        (
            "stream = self._in\n        for event in after:\n            stream.wait_event(event)\n",
            "stream = self._in\n",
            "a copy overwrites what is still read",
        ),
        (
            "stream = self._decode\n        for event in after:\n            stream.wait_event(event)\n",
            "stream = self._decode\n",
            "what is unpacked has not arrived",
        ),
        (
            "        self._out.wait_event(self.record(self.stream()))\n",
            "",
            "a gradient is copied before it is computed",
        ),
        (
            "        self.stream().wait_event(event)\n",
            "        pass\n",
            "a slot is read before its copy has arrived",
        ),
        ("return copied.query()", "return True", "host memory is overwritten before it was copied"),
    ),
    # -- core: packed units
    *_of(
        "core/device/staging.py",
        (
            "if low < end and start < high:",
            "if False:",
            "the ring is overwritten before it was decoded",
        ),
        (
            "((low, min(high, start)), (max(low, end), high))",
            "(() if low < end and start < high else ((low, high),))",
            "a part of the ring is overwritten by a copy on another stream before it was decoded",
        ),
        (
            "(copied, *after), timed)\n        self.release_after(event)",
            "(copied, *after), timed)",
            "the ring is free after the copy, not after the decoding",
        ),
    ),
    *_of(
        "core/placement/peer_memory.py",
        (
            "if self._block is block and self._version == version:",
            "if self._block is block:",
            "a changed weight is fetched from another device with its old value",
        ),
        (
            "(*self._filled, *self._read), False)",
            "self._filled, False)",
            "another device's memory is overwritten while it is copied from",
        ),
        (
            "(*self._filled, *after), timed)",
            "after, timed)",
            "another device's memory is copied from before it is filled",
        ),
        (
            "            backing.leave_peer()\n",
            "            pass\n",
            "another device's memory is kept after the layout",
        ),
    ),
    *_of(
        "core/placement/packed_residents.py",
        (
            "(), False)\n        self._engine.synchronize()\n",
            "(), False)\n",
            "wires are unpacked before they are there",
        ),
        (
            "read = [self._read[index]] if index in self._read else []",
            "read = []",
            "a wire is renewed while it is unpacked",
        ),
        (
            "fresh = [self._copied[unit.index]] if unit.index in self._copied else []",
            "fresh = []",
            "a renewed wire is unpacked before it is there",
        ),
        ("        self._versions.pop(unit.index, None)\n", "", "a block made anew is not copied"),
    ),
    *_of(
        "core/placement/packed_writes.py",
        (
            "            self._engine.synchronize()  # copies from the block may be running\n",
            "",
            "bytes are written over while they are copied from",
        ),
        (" or packed.snapshots or", " or", "a value that was taken before a write is written over"),
        (" or moving or", " or", "a unit that moves to a new block is written to in the old one"),
        (
            "            self.settle()\n        packed.header",
            "            pass\n        packed.header",
            "two units wait to move to new blocks",
        ),
        ("                    self._renew_decoder(backing)\n", "", "the decoder of a former value is kept"),
    ),
    *_of(
        "core/placement/packed_tier.py",
        (
            "self.engine.synchronize()  # copies from the old block",
            "pass  # copies from the old block",
            "a block is given up while it is copied from",
        ),
        (
            "        if pinned:\n            self.store.arena.pin(backing.block)\n",
            "",
            "a block made anew is not pinned",
        ),
    ),
    *_of(
        "core/streaming/streamer.py",
        (
            "self.engine.synchronize()\n            after_fetch()",
            "after_fetch()",
            "a block is unpinned while it is copied from",
        ),
        (
            "self.engine.synchronize(self.engine.copy_out(block.data, slot.views.base.detach()))",
            "self.engine.copy_out(block.data, slot.views.base.detach())",
            "unpacked weights are used before they are on the host",
        ),
        (
            "        finally:\n            with self.lock:\n                self.run.release(slot, (user,))\n",
            "        finally:\n            pass\n",
            "unpacking leaves slots in use",
        ),
    ),
    # -- core: weights from disk
    *_of(
        "core/placement/file_reads.py",
        (
            "                self._engine.synchronize()\n                with torch.inference_mode",
            "                with torch.inference_mode",
            "a value is overwritten while it is copied",
            "what arrives is of another version by then, and brought again before it is used",
        ),
        (
            "            file_tensor.accept(kept)\n            self._invalidate(file_tensor)\n",
            "            file_tensor.accept(kept)\n",
            "a written weight is used as it was",
        ),
    ),
    *_of(
        "core/placement/resident_loader.py",
        (
            "            self._follow(item)\n            self._mark_loaded(item)\n",
            "            self._mark_loaded(item)\n",
            "kernels read residents that are still being copied",
        ),
    ),
    *_of(
        "core/placement/resident_cache.py",
        (
            "                self._cache.discard(number)  # so that a later call reads them again\n",
            "",
            "wrong bytes stay in RAM, and every later attempt fails",
        ),
        (
            "            (item.engine or self._engine).synchronize()\n            raise\n",
            "            raise\n",
            "a copy that a failed load has begun reads memory that is given back",
        ),
    ),
    *_of(
        "core/placement/file_residents.py",
        (
            "            left.keep_changes(self._checkpoint)\n            self._left.remove(left)\n",
            "            self._left.remove(left)\n",
            "what was written to a resident is lost when another budget streams it",
        ),
        (
            "        return loaded and not self.tensor.requires_grad\n",
            "        return not self.tensor.requires_grad\n",
            "a resident whose data was assigned stays where its bytes are not",
        ),
    ),
    *_of(
        "core/host/host_cache.py",
        (
            "            for piece in pieces[len(copies) :]:\n                holding[piece.rank].in_use = False\n",
            "",
            "a copy that failed keeps its buffer for ever",
        ),
        (
            "                if copy_event is not None:\n                    buffer.copy_event = copy_event\n",
            "",
            "a buffer is read into while it is copied",
        ),
        (
            "                self._wait_for_copy(oldest.copy_event)\n",
            "",
            "the host does not wait for the copy of a buffer it needs",
        ),
    ),
    *_of(
        "core/host/buffer_pool.py",
        (
            "if buffer.copy_event is not None and self._copy_is_done(buffer.copy_event):",
            "if buffer.copy_event is not None:",
            "a buffer is read into before its copy is over",
        ),
        (
            "        self._totals.held_bytes += self.buffer_bytes(piece)\n",
            "",
            "the cache's memory is not counted",
        ),
        (
            "            buffer.block.unpin()\n            del buffer",
            "            del buffer",
            "the cache's buffers stay pinned after the end",
            "a block that nobody has any more is unpinned by its finalizer",
        ),
    ),
    *_of(
        "core/checkpoint/spill.py",
        (
            "or not _holds(file.path, offset, memory)",
            "",
            "bytes are taken as spilled by a sample of them",
        ),
        (
            "file.read_into(part, offset + at)",
            "file.read_into(part, at)",
            "bytes are compared with the beginning of the file",
        ),
        (
            "    except OSError:\n        return False\n",
            "    except OSError:\n        return True\n",
            "a file that is gone counts as one that has the bytes",
        ),
        ("(file, offset) in taken or", "", "equal tensors of one call are views of the same bytes"),
    ),
    *_of(
        "core/checkpoint/spill_file.py",
        (
            "        mapping = Mapping(self.handle, os.fstat(self.handle).st_size, access=_ACCESS)\n",
            "        mapping = vars(self).get('one') or Mapping(\n"
            "            self.handle, os.fstat(self.handle).st_size, access=_ACCESS\n"
            "        )\n        self.one = mapping\n",
            "tensors of two calls are views of one mapping",
        ),
        (
            "    if os.getpid() == owner:\n        _delete(path)",
            "    _delete(path)",
            "a forked process deletes the spill file of its parent",
        ),
    ),
    *_of(
        "core/checkpoint/mapped_views.py",
        ("if status.st_ino == mapping.inode:", "if True:", "a mapped file that was replaced is read"),
    ),
    *_of(
        "core/checkpoint/memory_maps.py",
        (
            "(last.end, last.inode, last.path) == (start, inode, path)",
            "(last.end, last.path) == (start, path)",
            "mappings of two files are joined",
        ),
    ),
    *_of(
        "core/checkpoint/index.py",
        (
            "(found.st_ino, found.st_dev) != (self.inode, self.device)",
            "False",
            "a file that was replaced while in use is read",
        ),
    ),
    *_of(
        "core/host/shared_memory.py",
        (
            "self.nbytes, mmap.ACCESS_COPY)",
            "self.nbytes, mmap.ACCESS_WRITE)",
            "a rank writes to the weights of the others",
        ),
    ),
    *_of(
        "core/placement/shared_weights.py",
        (
            "tuple(tensor.shape), tuple(tensor.stride())",
            "tuple(tensor.shape), ()",
            "ranks share a weight that has other strides on one of them",
        ),
        (
            "(f.size, f.mtime_ns, f.inode)",
            "(f.size, f.mtime_ns)",
            "ranks share weights of different files",
        ),
        (
            "chosen[node.rank :: node.size]",
            "chosen[:: node.size]",
            "every rank reads the same part of a file",
        ),
    ),
    *_of(
        "core/session/managed_module.py",
        (
            "self.note(follow_first_rank(self.root, node))",
            "pass",
            "ranks that seed otherwise compute with a mixture",
        ),
    ),
    *_of(
        "core/checkpoint/disk_reader.py",
        (
            "if priority == handle.priority else None",
            "",
            "a piece that became urgent is read in its old turn",
        ),
    ),
    # -- core: layouts
    *_of(
        "core/placement/attached_tensors.py",
        (
            "        tensor.__class__ = before\n        tensor.__dict__.pop",
            "        tensor.__dict__.pop",
            "weights keep the class of the session",
        ),
    ),
    *_of(
        "core/placement/pinned_tier.py",
        (
            "            self.block.unpin()\n",
            "            pass\n",
            "blocks stay pinned after the end",
            "a block that nobody has any more is unpinned by its finalizer",
        ),
    ),
    *_of(
        "core/placement/residents.py",
        (
            "            self.moved += [moved for members in undecided for moved in members if id(moved) not in known]\n",
            "",
            "a layout that failed forgets what is on the device",
        ),
        (
            "moved.tensor.data = moved.tensor.data.clone(memory_format=torch.preserve_format)",
            "pass",
            "closed: tensors keep the session's device buffer",
        ),
        (
            "                moved.tensor, moved.sites = entry.tensor, entry.sites\n",
            "                pass\n",
            "a buffer that the model replaced is not brought home",
        ),
    ),
    *_of(
        "core/session/tensor_access.py",
        (
            "                    unit.epoch += 1\n",
            "                    pass\n",
            "refresh() refreshes nothing",
        ),
    ),
    *_of(
        "core/session/device_weights.py",
        ("        locks.callback(manager.lock.release)\n", "", "who was asked to give keeps its lock"),
        (
            "return self.movable and not (layout.runner.in_use(Use.GRAPH) or layout.meter.awaiting)",
            "return self.movable",
            "who is asked gives though a backward is to come",
        ),
    ),
    *_of(
        "core/session/layout_manager.py",
        (
            "        self.engine.trim()  # return the allocator's cached memory to the device",
            "        pass  # return the allocator's cached memory to the device",
            "parked: the allocator keeps the device's memory",
        ),
        (
            "                    self.host.copies.clear()\n",
            "                    pass\n",
            "copies of a parking that failed are trusted",
        ),
    ),
    *_of(
        "core/budget/ledger.py",
        (
            "            self.governor.gave()\n            if bounded",
            "            if bounded",
            "who gave way takes it back at once",
        ),
        (
            "            self._vram = min(budget, self.most(budget))",
            "            self._vram = budget",
            "a shared budget is exceeded",
        ),
        (
            "return 0 if self._laying or self.holder.attached else self._keeps",
            "return 0",
            "a parked session's least is given away",
        ),
    ),
    *_of(
        "core/budget/shared_budget.py",
        (
            "taken += promised if each is member else max(promised, each.kept_bytes)",
            "taken += promised",
            "what is kept for others is free",
        ),
        (
            "self.nbytes = min(self.nbytes, self._spoken_for(None))",
            "pass",
            "what was given up after a failure is taken again",
        ),
    ),
    *_of(
        "core/session/policies/device_memory.py",
        (
            "        self._manager.engine.trim()\n        self._resized()",
            "        self._resized()",
            "after a fall the allocator keeps what was given up",
            "the layout returns it before it allocates; this call returns temporary memory of the layout itself",
        ),
        (
            "if budget is None or not before.restore():",
            "if budget is None:",
            "a pass runs again on what the failed one wrote",
        ),
    ),
    *_of(
        "core/session/policies/host_memory.py",
        (
            "        self._manager.host.copies.unpin_resident_copies(before - limit)\n",
            "",
            "copies of residents stay pinned where memory is short",
        ),
    ),
    *_of(
        "core/session/policies/raise_budget.py",
        (
            "            room.failed(beyond)\n        else:  # the host",
            "            pass\n        else:  # the host",
            "what was too much is taken again",
        ),
        (
            "if not manager.phase.parked and (before is None or not before.restore()):",
            "if not manager.phase.parked and before is None:",
            "a pass runs again on what the failed one wrote",
        ),
    ),
    *_of(
        "core/budget/optimizer_reserve.py",
        ("    place.trim()  #", "    pass  #", "pieces that the allocator keeps count as room for the state"),
        (
            "activations = max(activations, before.cached - memory.cached)",
            "pass",
            "activations have no room beside the state",
        ),
    ),
    *_of(
        "core/metrics/meter.py",
        (
            "            step.wire_bytes += nbytes\n",
            "            step.wire_bytes += raw_bytes\n",
            "wire bytes are raw bytes",
        ),
        (
            "        self._engine.synchronize()\n        if self._open",
            "        if self._open",
            "a report reads times that are not there yet",
        ),
        (
            "step.disk_bytes, self._disk_before = read - self._disk_before, read",
            "step.disk_bytes = read",
            "all reads count anew in every step",
        ),
    ),
    *_of(
        "core/metrics/report.py",
        (
            "return self.resident_bytes + packed + self.streamed_bytes",
            "return self.resident_bytes + self.streamed_bytes",
            "what stays packed counts by its packed bytes",
        ),
    ),
    *_of(
        "core/model/interpose.py",
        (
            "    front.live = False\n    if module",
            "    if module",
            "a front that others stepped before runs on",
        ),
    ),
    *_of(
        "core/streaming/root_forward.py",
        (
            "                _end(running, True)\n",
            "                _end(running, False)\n",
            "a failed pass ends as one that went well",
        ),
        (
            "        leaf.register_hook(noted if leaf.grad_fn is not None else lambda _: running.begin_backward())\n",
            "        pass\n",
            "the backward of a resident model is not seen",
        ),
    ),
    *_of(
        "core/model/quantized.py",
        ("            hook.remove()\n", "            pass\n", "hooks of state dicts stay after the end"),
        (
            "                self._resident_wrappers.pop(name, None)\n",
            "                pass\n",
            "what a run left in a wrapper is there at the next",
        ),
    ),
    *_of(
        "core/model/wrapper_cache.py",
        (
            "if len(holder) != len(held) or not all(map(operator.is_, _parts(holder), held)):",
            "if False:",
            "a changed wrapper is used",
        ),
    ),
    *_of(
        "core/streaming/vbar_slots.py",
        (
            "            else:\n                self._bar.unpin(*self._homes",
            "            elif False:\n                self._bar.unpin(*self._homes",
            "a home whose copy failed stays pinned",
        ),
        (
            "                bar.set_watermark(0)\n",
            "                pass\n",
            "closed: pages are not given back",
        ),
    ),
    *_of(
        "core/session/policies/vbar_pressure.py",
        (
            "            self._regrowth.lost()\n",
            "            pass\n",
            "homes that were taken are wanted back as soon as at first",
        ),
    ),
    # -- ComfyUI
    *_of(
        "nodes/streaming.py",
        (
            "        except BaseException:\n            self.changes.undo()\n",
            "        except BaseException:\n",
            "a model that could not be opened stays taken apart",
        ),
        (
            "            comfyui_api.count_pinned(-self._pins[0])\n",
            "            pass\n",
            "pinned bytes stay counted after the end",
        ),
        (
            "        suspended_models[self] = None\n",
            "",
            "a suspended model keeps its pins when others need them",
        ),
    ),
    *_of(
        "nodes/patcher.py",
        (
            "            self.skip_injection = before\n",
            "            pass\n",
            "after an unload nothing is injected any more",
        ),
        (
            "                self.detach()  # type: ignore[attr-defined]\n",
            "                pass\n",
            "a failed load leaves the model half loaded",
        ),
        (
            "            self._carom.session.expect_anew()\n",
            "            pass\n",
            "sizes seen before others had the device count as seen",
        ),
    ),
    # -- ai-toolkit
    *_of(
        "toolkit_ext/attachment.py",
        (
            "                    laid_open.close()\n                    raise",
            "                    raise",
            "a failed start leaves wrapped weights open",
        ),
        (
            "                self._listen()\n",
            "                pass\n",
            "after a pause a part that is called alone does not stream",
        ),
        ("not session.parked and device ==", "device ==", "a parked model is not brought back by .to"),
    ),
    *_of(
        "toolkit_ext/job.py",
        (
            "        self.reports.keep(attachment)\n        attachment.detach",
            "        attachment.detach",
            "an unloaded model's report is lost",
        ),
        (
            "        self.sessions.rebalance()\n\n    def ready",
            "\n    def ready",
            "an unloaded model's part is nobody's",
        ),
    ),
]
