"""The bugs that `simulation_mutants` plants: a text of the core, what stands there instead, and the invariant that must find it."""

from __future__ import annotations

from dataclasses import dataclass

from simulation_model import Invariant

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A small change of one file of `tiers/`, named for what goes wrong by it."""

    name: str
    invariant: Invariant
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "slots of a fallen writer are given away at once",
        Invariant.SLOTS,
        "grants.py",
        "store.owner.engine_id, set(writers))",
        "store.owner.engine_id, set())",
    ),
    Mutant(
        "a stranger's late completion frees slots",
        Invariant.SLOTS,
        "grants.py",
        "if entry is not None and entry.engine_id == engine_id:",
        "if entry is not None:",
    ),
    Mutant(
        "the slot of a part that failed is freed and kept",
        Invariant.SLOTS,
        "stores.py",
        "self._primary.release([self._primary.detach_slot(block, store.rank)])",
        "self._primary.release([block.slots[store.rank]])",
    ),
    Mutant(
        "a block that is read is evicted",
        Invariant.PINS,
        "primary.py",
        "return (block for block in policy.victims() if block.pins == 0) if policy else iter(())",
        "return iter(policy.victims()) if policy else iter(())",
    ),
    Mutant(
        "an extent is taken over with what is pinned in it",
        Invariant.PINS,
        "primary.py",
        "if owner is not None and owner.pins == 0)",
        "if owner is not None)",
    ),
    Mutant(
        "a block that waits for a tier is not pinned",
        Invariant.PINS,
        "flow.py",
        "        block.pins += 1\n        lane.queue.append(block)",
        "        lane.queue.append(block)",
    ),
    Mutant(
        "leases outlive their session",
        Invariant.OWNERS,
        "manager.py",
        "for lease in self._lookups.leases.of_session(session_id):",
        "for lease in ():",
    ),
    Mutant(
        "of what has expired only the first lease ends",
        Invariant.OWNERS,
        "leases.py",
        "return [lease for lease in self._leases.values() if lease.expires_at <= now]",
        "return [lease for lease in self._leases.values() if lease.expires_at <= now][:1]",
    ),
    Mutant(
        "a clock that goes back shortens leases",
        Invariant.OWNERS,
        "manager.py",
        "lease.expires_at = max(lease.expires_at, expires_at)",
        "lease.expires_at = expires_at",
    ),
    Mutant(
        "a job that has ended ends again",
        Invariant.JOBS,
        "flow.py",
        "job = self._jobs.pop(job_id, None)",
        "job = self._jobs.get(job_id)",
    ),
    Mutant(
        "a tier that hangs holds up the others",
        Invariant.JOBS,
        "flow.py",
        "        if lane.storing:\n",
        "        if any(other.storing for other in self.lanes):\n",
    ),
    Mutant(
        "what came in during a job is forgotten",
        Invariant.JOBS,
        "flow.py",
        "            job.lane.storing = False\n            self._advance(job.lane)\n",
        "            job.lane.storing = False\n",
    ),
    Mutant(
        "a question to a tier is never put",
        Invariant.JOBS,
        "lookups.py",
        "        record = self._record(owner, now, spans, first_miss)\n        self._flow.ask()\n",
        "        record = self._record(owner, now, spans, first_miss)\n",
    ),
    Mutant(
        "a tier gets two stores at a time",
        Invariant.APART,
        "flow.py",
        "        if lane.storing:\n            return\n",
        "",
    ),
    Mutant(
        "a block is removed while it is loaded",
        Invariant.APART,
        "catalog.py",
        "entry.state is EntryState.HELD and not entry.loads and",
        "entry.state is EntryState.HELD and",
    ),
    Mutant(
        "what was evicted from a tier stays in it",
        Invariant.CAPACITY,
        "flow.py",
        "        lane.doomed += victims\n",
        "",
    ),
    Mutant(
        "what was dropped from a tier counts on",
        Invariant.CAPACITY,
        "catalog.py",
        "        self.used_bytes -= entry.nbytes\n",
        "",
    ),
    Mutant(
        "a tier is filled beyond its room",
        Invariant.CAPACITY,
        "catalog.py",
        "self._victims(self.used_bytes + nbytes - self.capacity_bytes)",
        "self._victims(self.used_bytes - self.capacity_bytes)",
    ),
    Mutant(
        "tiers hear of the end while blocks are on their way",
        Invariant.FINISH,
        "requests.py",
        "and not self.stores and not self.waiting and not self.owed",
        "and not self.stores and not self.waiting",
    ),
    Mutant(
        "tiers hear of the end while the engine stores",
        Invariant.FINISH,
        "requests.py",
        "and not self.stores and not self.waiting and not self.owed",
        "and not self.waiting and not self.owed",
    ),
    Mutant(
        "tiers never hear of the end of what is paid last",
        Invariant.FINISH,
        "manager.py",
        "        for request in finished.paid:\n            self._requests.end_if_settled(request)\n",
        "",
    ),
    Mutant(
        "a fallen session's requests go on",
        Invariant.FINISH,
        "manager.py",
        "                self._requests.finish(request, give_up=True)\n",
        "                pass\n",
    ),
    Mutant(
        "what a tier cannot take is dropped in silence",
        Invariant.OWED,
        "flow.py",
        "                    lane.dropped += 1\n                    request.incomplete += 1\n",
        "                    lane.dropped += 1\n",
    ),
    Mutant(
        "what a tier failed to store is dropped in silence",
        Invariant.OWED,
        "flow.py",
        "            request.incomplete += not stored\n",
        "",
    ),
    Mutant(
        "a block is visible when its first part is",
        Invariant.BYTES,
        "blocks.py",
        "self.ready = self.written == self._all_written",
        "self.ready = True",
    ),
    Mutant(
        "a promotion that failed is served",
        Invariant.BYTES,
        "manager.py",
        "            if done and not block.retired:\n",
        "            if not block.retired:\n",
    ),
    Mutant(
        "a part that was not written is served",
        Invariant.BYTES,
        "stores.py",
        "            if number in missing or block.retired:\n",
        "            if block.retired:\n",
    ),
    Mutant(
        "what is on its way counts twice",
        Invariant.COUNTS,
        "lookups.py",
        "self.tally.hit(source, -1)",
        "self.tally.hit(source, 0)",
    ),
    Mutant(
        "what a tier gave back counts for the CPU tier",
        Invariant.COUNTS,
        "lookups.py",
        "            if block.ready:\n                self.tally.hit(source)\n",
        "            if block.ready:\n                self.tally.hit(0)\n",
    ),
    Mutant(
        "a tier that was left out is read",
        Invariant.FOUND,
        "lane.py",
        "return tier.name in tiers.names or",
        "return",
    ),
    Mutant(
        "why a block left is forgotten",
        Invariant.FOUND,
        "history.py",
        "        young[key] = reason\n",
        "",
    ),
    Mutant(
        "a lookup in the middle of a reset finds",
        Invariant.RESET,
        "lookups.py",
        "if self._primary.retiring(session.namespace.id):",
        "if False:",
    ),
    Mutant(
        "what is pinned survives a reset",
        Invariant.RESET,
        "primary.py",
        "                block.retired = True\n                self._unlist(block)\n",
        "                block.retired = True\n",
    ),
    Mutant(
        "who waits is never told",
        Invariant.WAITERS,
        "manager.py",
        "self._commands.extend(LeaseSettled(lease.id) for lease in self._lookups.settle(block))",
        "self._lookups.settle(block)",
    ),
    Mutant(
        "who waits for what failed waits on",
        Invariant.WAITERS,
        "leases.py",
        "            lease.pending -= 1\n            if not block.ready:\n",
        "            lease.pending -= block.ready\n            if not block.ready:\n",
    ),
    Mutant(
        "a stranger may end a lease",
        Invariant.REFUSALS,
        "leases.py",
        "if lease.owner.engine_id != engine_id:",
        "if False:",
    ),
    Mutant(
        "a completion that is refused ends its store",
        Invariant.REFUSALS,
        "stores.py",
        "        store = self.table.get(store_id, session.engine_id)\n        if any(",
        "        store = self.table.get(store_id, session.engine_id)\n        self.table.end(store)\n        if any(",
    ),
    Mutant(
        "what is on its way is called durable",
        Invariant.DURABLE,
        "flow.py",
        "lane.tier.durable and lane.catalog.held(namespace, key) for",
        "lane.tier.durable and lane.catalog.get(namespace, key) for",
    ),
    Mutant(
        "what is gone stays in line",
        Invariant.LINE,
        "primary.py",
        "        block.order.remove(block)\n",
        "",
    ),
    Mutant(
        "a quarantine is never lifted",
        Invariant.LEAKS,
        "grants.py",
        "            entry.writers.discard(writer)\n            self._lift_if_free(store_id)\n",
        "            entry.writers.discard(writer)\n",
    ),
    Mutant(
        "who let go is waited for",
        Invariant.LEAKS,
        "leases.py",
        "            waiting[:] = [entry for entry in waiting if entry[0] is not lease]\n",
        "",
    ),
    Mutant(
        "an empty block stays",
        Invariant.LEAKS,
        "primary.py",
        "if block.pins == 0 and (block.retired or",
        "if block.pins == 0 and block.written and (block.retired or",
    ),
    Mutant(
        "a result of nobody's job brings it down",
        Invariant.RAISED,
        "flow.py",
        "job = self._jobs.pop(job_id, None)",
        "job = self._jobs.pop(job_id)",
    ),
)
