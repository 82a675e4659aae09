"""Faults in the client: adapters of engines, offload, hand-off, sessions and transports."""

from __future__ import annotations

from harness.planting import Fault

__all__ = ["CLIENT_FAULTS"]

_WORKER = "client/engines/vllm/worker/worker.py"
_REPORTS = "client/engines/vllm/worker/reports.py"
_SCHEDULER = "client/engines/vllm/scheduler/scheduler.py"
_CALLS = "client/engines/vllm/scheduler/server_calls.py"
_LOOKUPS = "client/engines/vllm/scheduler/prefix_lookups.py"
_HOLDS = "client/engines/vllm/scheduler/hold_calls.py"
_REQUESTS = "client/engines/vllm/scheduler/requests.py"
_TIER = "client/engines/vllm_tier/"
_SGLANG = "client/engines/sglang/"
_TRANSFORMERS = "client/engines/transformers/"

CLIENT_FAULTS = (
    Fault(
        "a batch of saves has one key too many",
        _WORKER,
        "or index - start >= most):",
        "or index - start > most):",
    ),
    Fault(
        "a failed load is reported as loaded",
        _WORKER,
        "        failed = True\n        try:\n            for read in job.reads:",
        "        failed = False\n        try:\n            for read in job.reads:",
    ),
    Fault("an old save still copies", _WORKER, "if time.monotonic() >= write_until:", "if False:"),
    Fault(
        "keys of the second batch have the numbers of the first",
        _WORKER,
        "return [chunk.start + index for index,",
        "return [index for index,",
    ),
    Fault(
        "a block that another engine is writing counts as stored",
        _WORKER,
        "frozenset((StoreStatus.GRANTED, StoreStatus.PRESENT))",
        "frozenset((StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.IN_PROGRESS))",
    ),
    Fault(
        "one refused save pauses all saves",
        _WORKER,
        "and not isinstance(error, (InvalidRequest, EngineAsleep)):",
        "and not isinstance(error, EngineAsleep):",
    ),
    Fault(
        "a worker of another namespace copies blocks", _WORKER, "if step.namespace_digest != self._digest:", "if False:"
    ),
    Fault(
        "a save copies while the engine sleeps",
        _WORKER,
        "                with self._gate.copying():\n                    copier.copy_out(group, ids",
        "                with suppress():\n                    copier.copy_out(group, ids",
    ),
    Fault(
        "an audit compares no block",
        _WORKER,
        "        if job.audits:\n",
        "        if not job.audits:\n",
    ),
    Fault(
        "an audit that fails fails the save",
        _WORKER,
        '            except (KVTierError, EngineAsleep) as error:\n                self._log.warn("audit"',
        '            except EngineAsleep as error:\n                self._log.warn("audit"',
    ),
    Fault(
        "a worker without stores does not report saves",
        _WORKER,
        "            for job in step.saves:\n                self._reports.save_ended(job.job_id)\n            return",
        "            return",
    ),
    Fault(
        "only the last worker's failures count",
        _REPORTS,
        "merged.not_stored.get(job_id, set()) | missed",
        "missed",
    ),
    Fault("reports of workers replace each other", _REPORTS, "merged.ended_saves.get(job_id, 0) | workers", "workers"),
    Fault(
        "a refused save counts as stored",
        _REPORTS,
        "self.save_ended(job.job_id, range(len(job.keys)))",
        "self.save_ended(job.job_id)",
    ),
    Fault(
        "runs ignore a change of the distance of slots",
        "client/engines/vllm/worker/copies.py",
        "and distance > 0 and run.distance in (0, distance)",
        "and distance > 0",
    ),
    Fault(
        "every segment is copied to the start of the slot",
        "client/engines/vllm/worker/copies.py",
        "memory, run.offset + slot_offset, strides)",
        "memory, run.offset, strides)",
    ),
    Fault(
        "the first ended job releases the event of its step",
        "client/engines/vllm/worker/device_route.py",
        "over = not self._jobs",
        "over = True",
    ),
    Fault(
        "blocks of a peer are read through the own server's copy worker",
        "client/engines/vllm/worker/device_route.py",
        "if client is not self._client or after.mark is None:\n            return False",
        "if after.mark is None:\n            return False",
    ),
    Fault(
        "a request ends at the server while a lookup runs",
        _CALLS,
        "            request.ended = True\n            finish = request.pending == 0",
        "            request.ended = True\n            finish = True",
    ),
    Fault(
        "a refused request opens the circuit",
        "client/engines/vllm/background.py",
        "if not isinstance(error, (InvalidRequest, LimitExceeded)):",
        "if True:",
    ),
    Fault("a reset ends after the first empty answer", _CALLS, "_RESET_ROUNDS = 2", "_RESET_ROUNDS = 1"),
    Fault(
        "a lookup that is dropped after its end keeps its lease",
        _LOOKUPS,
        "        if was_done:\n            self._release(lookup)\n",
        "",
    ),
    Fault(
        "a hit below min_hit_tokens is loaded",
        _LOOKUPS,
        "return hit if hit - lookup.start >= lookup.request.settings.min_hit_tokens else lookup.start",
        "return hit",
    ),
    Fault(
        "a prefix lookup continues after a miss",
        _LOOKUPS,
        "            if query.prefix and len(hits) < len(chunk):\n                break\n",
        "",
    ),
    Fault(
        "a partial block gets a key before its tokens are known",
        _REQUESTS,
        "if start + len(tokens) < num_tokens or position > len(hashes):",
        "if position > len(hashes):",
    ),
    Fault(
        "a publication without an answer is not repeated",
        _HOLDS,
        "is safe.\n                status = self._publish_once(client, publication)",
        "is safe.\n                return",
    ),
    Fault(
        "a failed load counts as a hit in the core",
        _SCHEDULER,
        "self._core.loads_ended(finished_loads, failed_loads)",
        "self._core.loads_ended(finished_loads, ())",
    ),
    Fault(
        "pages of SGLang are loaded with a lease of a lost session",
        _SGLANG + "found_pages.py",
        "found.lease.session.ended or not all",
        "not all",
    ),
    Fault(
        "a window of SGLang is one page",
        _SGLANG + "found_pages.py",
        "range(max(0, length - self.pages), length)",
        "range(length - 1, length)",
    ),
    Fault(
        "all pieces of a page of SGLang go to the begin of its slot",
        _SGLANG + "links.py",
        "address + offset + start for",
        "address + offset for",
    ),
    Fault(
        "a second call stores the first pages of SGLang again",
        _SGLANG + "links.py",
        "(first + number) * pieces",
        "number * pieces",
    ),
    Fault(
        "pages of SGLang without room count as stored",
        _SGLANG + "links.py",
        "StoreStatus.IN_PROGRESS))",
        "StoreStatus.IN_PROGRESS, StoreStatus.NO_ROOM))",
    ),
    Fault(
        "pages of SGLang that were not confirmed count as loaded",
        _SGLANG + "links.py",
        "                    loaded = end\n",
        "                    pass\n            except KVTierError:\n                loaded = len(hashes)\n",
    ),
    Fault(
        "engines of SGLang with other formats of pages share blocks",
        _SGLANG + "namespace.py",
        ', "pools": digest_of_settings([pool.describe() for pool in members])}',
        "}",
    ),
    Fault(
        "calls by SGLang do not end while the server hangs",
        _SGLANG + "deadlines.py",
        "min(effect.timeout, self._deadline.left(least=least))",
        "effect.timeout",
    ),
    Fault(
        "a retrained LoRA adapter of SGLang keeps its pages",
        _SGLANG + "namespace.py",
        "name, path, identify_adapter(path)",
        "name, path, path",
    ),
    Fault(
        "a clear of SGLang's storage changes nothing",
        _SGLANG + "storage.py",
        "        KVTierStorage._clears += 1\n",
        "",
    ),
    Fault(
        "blocks that were not stored are announced",
        "client/engines/vllm/scheduler/kv_events.py",
        "if position not in save.not_stored and not is_hold_key(key):",
        "if not is_hold_key(key):",
    ),
    Fault(
        "saves that cannot start are not reported",
        "client/engines/vllm/hooks.py",
        "if isinstance(step, StepMetadata) and step.saves and not self._start_saves(step):\n"
        "            self._reports.refuse_saves(step)",
        "if isinstance(step, StepMetadata) and step.saves:\n            self._start_saves(step)",
    ),
    Fault(
        "a lease may be shorter than two expiry margins",
        "client/engines/vllm/config.py",
        "_MIN_LEASE_S = 3 * EXPIRY_MARGIN_S",
        "_MIN_LEASE_S = EXPIRY_MARGIN_S",
    ),
    Fault(
        "an engine connects to any server that a request names",
        "client/engines/vllm/peers.py",
        "return self._allowed.get(address)",
        'return self._allowed.get(address, f"{remote.host}:{remote.port}")',
    ),
    Fault(
        "an abandoned job begins its copy",
        _TIER + "transfers.py",
        "            if job.ended:\n                raise _Abandoned\n",
        "",
    ),
    Fault(
        "a lookup without hits keeps its leases",
        _TIER + "tier_lookups.py",
        "            else:\n                self.release_leases(batch.leases)\n",
        "",
    ),
    Fault(
        "hits are released while a load runs",
        _TIER + "tier_lookups.py",
        "        if request.loading == 0:\n",
        "        if True:\n",
    ),
    Fault(
        "nothing of a partial load is used",
        _TIER + "manager.py",
        "done.successful_keys = tuple(job.done) if job.done and not job.succeeded else None",
        "done.successful_keys = None",
    ),
    Fault(
        "a loaded hit stays pinned",
        "client/offload/loads.py",
        "        state.loading = lookup\n        if lookup is None",
        "        if lookup is None",
    ),
    Fault(
        "the head of a prefix is released before its tail",
        "client/offload/saves.py",
        "self._pool.release(job.block_ids[::-1])",
        "self._pool.release(job.block_ids)",
    ),
    Fault(
        "a request is looked at a step after it has filled a block",
        "client/offload/saves.py",
        "due_at = self._clock + tokens\n",
        "due_at = self._clock + tokens + 1\n",
    ),
    Fault(
        "a step with drafts counts as one token",
        "client/offload/saves.py",
        "self._clock += min(most, usual)",
        "self._clock += 1",
    ),
    Fault(
        "blocks that were not stored wait for the next block",
        "client/offload/core.py",
        "                self._missed()\n",
        "                pass\n",
    ),
    Fault(
        "tokens of a step whose plan failed are not counted",
        _SCHEDULER,
        "        if not was_planned:\n            self._core.all_due()\n",
        "",
    ),
    Fault(
        "a change of the namespace is not sent",
        _SCHEDULER,
        " and self._sent_digest == self._digest:",
        ":",
    ),
    Fault(
        "a block counts as stored when one worker has stored it",
        "client/offload/saves.py",
        "if state.workers.bit_count() >= self._world_size:",
        "if state.workers:",
    ),
    Fault(
        "a request that ends while it is loaded ends at once",
        "client/offload/core.py",
        "            state.phase = RequestPhase.ENDING\n            return\n",
        "            self._end(state)\n            return\n",
    ),
    Fault(
        "a hold is pulled within its expiry margin",
        "client/handoff/core.py",
        "params.expiry_time - EXPIRY_MARGIN_S <= wall_time",
        "params.expiry_time <= wall_time",
    ),
    Fault(
        "an aborted request is held",
        "client/handoff/core.py",
        "is_held = state.hold_at_end and reason.is_normal and not is_pulling",
        "is_held = state.hold_at_end and not is_pulling",
    ),
    Fault(
        "the peer's hold is not released after the pull",
        "client/handoff/core.py",
        "        if state.params.remote is not None:\n            self._server.release(state.params.remote)\n",
        "",
    ),
    Fault(
        "the end of a session does not end its streams",
        "client/session/session.py",
        "        for cancel in cancels:\n            cancel()\n",
        "",
    ),
    Fault(
        "a client never notices a silent server",
        "client/session/reconnect.py",
        "heartbeats.next_within(_SILENT_INTERVALS * first",
        "heartbeats.next_within(1000 * _SILENT_INTERVALS * first",
    ),
    Fault(
        "a session with a server that was restarted meanwhile is used",
        "client/session/reconnect.py",
        "if first.session.epoch != capabilities.epoch:",
        "if False:",
    ),
    Fault(
        "a cancelled stream runs to its end",
        "client/transport/aio_transport.py",
        "            cancelled = error\n            on_cancel()\n",
        "            cancelled = error\n",
    ),
    Fault(
        "a damaged frame of a socket is accepted",
        "client/transport/socket_streams.py",
        "sink.verify(data, checksum_on(connection, views))",
        "sink.verify(data, data.xxh3_64)",
    ),
    Fault(
        "a stream over a socket has no deadline",
        "client/transport/socket_streams.py",
        "                    connection.set_deadline(deadline - time.monotonic(), stall_seconds)\n",
        "",
    ),
    Fault(
        "bytes after an answer are read as another answer",
        "client/session/socket_calls.py",
        "        connection.shutdown()\n    if len(body) == length:",
        "        pass\n    if len(body) == length:",
    ),
    Fault(
        "a wait for tiers leaves SGLang no time for copies",
        _SGLANG + "links.py",
        "self._client.deadline.left() - COPY_SECONDS",
        "self._client.deadline.left()",
    ),
    Fault(
        "a downgrade after a recovery is not logged",
        "client/session/session.py",
        "        self._warned.pop(what, None)\n",
        "",
    ),
    Fault(
        "a busy server ends a withdrawal",
        "client/session/withdrawals.py",
        'reason not in (None, "RATE_LIMITED", "LIMIT_EXCEEDED")',
        "reason is not None",
    ),
    Fault(
        "a client retries as often as in the beginning",
        "client/session/reconnect.py",
        "                self._report(error)\n                backoff.grow()",
        "                self._report(error)",
    ),
    Fault(
        "the close of an asyncio client leaves its calls open",
        "client/transport/socket_calls_aio.py",
        "[*self._idle, *self._busy]",
        "[*self._idle]",
    ),
    Fault(
        "streams use the connection of an ended session",
        "client/transport/socket_connector.py",
        "streams is not None and self._session is session",
        "streams is not None",
    ),
    Fault(
        "the failure of an old connection ends the new one",
        "client/transport/socket_connector.py",
        "            if self._streams is not streams:\n                return\n",
        "",
    ),
    Fault(
        "an interrupt leaves the stream of a retry running",
        "client/transport/sync_transport.py",
        "            if interrupted.is_set():\n                call.cancel()\n",
        "",
    ),
    Fault(
        "a load without a leading hit keeps its lease",
        "client/operations/loads.py",
        "            if found.id:\n                yield from self._release_granted(found, held.grant_id)\n            return 0",
        "            return 0",
    ),
    Fault(
        "a stream that was retried confirms the load",
        "client/operations/loads.py",
        "complete=complete and attempt == 1",
        "complete=complete",
    ),
    Fault(
        "the wait of a new request is not in the deadline of its call",
        "client/operations/lookups.py",
        '"CacheService/BeginRequest", request, wait, grant_id',
        '"CacheService/BeginRequest", request, grant_id',
    ),
    Fault(
        "a part that arrived in part counts as complete",
        "client/part_streams.py",
        "if any(start < last and first < stop for start, stop in gaps)",
        "if any(start <= first and last <= stop for start, stop in gaps)",
    ),
    Fault(
        "a replay does not remove what is gone",
        "client/events/follower.py",
        "            changes += _removed(self._known.end_replay())\n",
        "            pass\n",
    ),
    Fault(
        "blocks of a server that is away stay known",
        "client/events/stream.py",
        "                if time.monotonic() - self._seen_at > self._gone_seconds:\n",
        "                if False:\n",
    ),
    Fault(
        "buffers are not in the digest of the weights",
        _TRANSFORMERS + "model_identity.py",
        "if isinstance(state, TensorState) and path not in own_paths\n        ]",
        "if isinstance(state, TensorState) and path.endswith('weight')\n        ]",
    ),
    Fault(
        "a missing block does not end the hit",
        _TRANSFORMERS + "cache.py",
        "hits = lease.prefix_hits",
        "hits = len(keys)",
    ),
    Fault(
        "the lease of a restore is kept",
        _TRANSFORMERS + "cache.py",
        "            lease.release()\n",
        "            pass\n",
    ),
    Fault(
        "guidance is cached",
        _TRANSFORMERS + "generate_settings.py",
        '        *("attention_mask", "generation_config",',
        '        *("attention_mask", "generation_config", "guidance_scale",',
    ),
    Fault(
        "changes in place are not counted",
        _TRANSFORMERS + "model_state.py",
        "return version, tensor.data_ptr(),",
        "return tensor.data_ptr(),",
    ),
    Fault(
        "no element of a tensor is read",
        _TRANSFORMERS + "model_state.py",
        "return same and read_samples(tensors, self._tensors) == self._samples",
        "return same",
    ),
    Fault(
        "flags of modules are not looked at",
        _TRANSFORMERS + "model_state.py",
        "return [*map(id, members)], [*map(id, names)],",
        "return [], [*map(id, names)],",
    ),
    Fault(
        "blocks of all lengths are shared",
        _TRANSFORMERS + "length_regimes.py",
        'return f"lengths from {self.ranges[regime][0]}".encode() if regime else b""',
        'return b""',
    ),
    Fault(
        "an answer that crosses a limit is stored",
        _TRANSFORMERS + "cache.py",
        "origin != (session.moment, regime):",
        "origin[:1] != (session.moment,):",
    ),
    Fault(
        "weights that change during their digest count",
        _TRANSFORMERS + "model_identity.py",
        "if found != self._samples[first * size : first * size + len(found)]:",
        "if False:",
    ),
    Fault(
        "an object at the address of an earlier one counts as the same",
        _TRANSFORMERS + "model_state.py",
        "self._identify(self._alive)",
        "self._identify()",
    ),
    Fault(
        "a changed model keeps its namespace",
        _TRANSFORMERS + "cache.py",
        "self._connect(with_weights_version(namespace, moment.version))",
        "self._connect(namespace)",
    ),
    Fault(
        "a cache of a longer sequence is stored",
        _TRANSFORMERS + "cache.py",
        "session.regimes.of(length) != regime or origin",
        "origin",
    ),
    Fault(
        "a name alone stands for the weights",
        _TRANSFORMERS + "cache.py",
        "name is not None and revision is not None",
        "name is not None or revision is not None",
    ),
    Fault(
        "a short layer is stored",
        _TRANSFORMERS + "layout.py",
        "            and tensor.shape[2] >= tokens\n",
        "",
    ),
)
