"""Faults in the server: services, calls, the bulk process, devices, access, settings, status."""

from __future__ import annotations

from harness.planting import Fault

__all__ = ["SERVER_FAULTS"]

_CACHE = "server/services/cache.py"
_TRANSFER = "server/services/transfer.py"
_DEVICES = "server/services/devices.py"
_SESSIONS = "server/rpc/sessions.py"
_IN_FLIGHT_LIMITS = "server/rpc/in_flight_limits.py"
_SOCKETS = "server/rpc/socket_calls.py"
_STREAMS = "server/bulk/streams.py"
_BROKER = "server/bulk/broker.py"
_CLIENT = "server/bulk/broker_client.py"
_WORKER = "server/devices/copy_worker.py"
_WORKER_CLIENT = "server/devices/copy_worker_client.py"
_REGISTRY = "server/devices/registry.py"

_DIGESTS = "server/region_digests.py"

_WARM = "server/warm_restart.py"

SERVER_FAULTS = (
    Fault(
        "the end of a server frees the slots of clients that still write",
        "server/rpc/attach_socket.py",
        "        except asyncio.CancelledError:\n            ended = False\n            raise\n",
        "        except asyncio.CancelledError:\n            raise\n",
    ),
    Fault(
        "the end of a server forgets the connections of clients that still write",
        _WARM,
        "        except asyncio.CancelledError:\n            ended = False\n            raise\n",
        "        except asyncio.CancelledError:\n            raise\n",
    ),
    Fault(
        "the connections of clients that map the region are not kept",
        _WARM,
        "            store.keep(name, connection.fileno(), until_hangup=True)\n",
        "            pass\n",
    ),
    Fault(
        "a server does not wait for the processes of the earlier one",
        _WARM,
        "        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):\n",
        "        if False:\n",
    ),
    Fault(
        "damaged records are used",
        _WARM,
        "            records.check()\n",
        "",
    ),
    Fault(
        "slots stay out of use when the last connection of their client has ended",
        _WARM,
        "        if not self._writers[tag]:\n            del self._writers[tag]\n            gone(tag)\n",
        "",
    ),
    Fault(
        "granted slots keep the digests of earlier blocks",
        _CACHE,
        "        self._runtime.digests.clear(answer.slots)\n",
        "",
    ),
    Fault(
        "a client is believed that intact blocks are damaged",
        "server/services/long_calls.py",
        "self._runtime.remove_damaged([blocks[number] for number in damaged], name)",
        "self._runtime.remove_damaged(blocks, name)",
    ),
    Fault(
        "a reported block is not removed",
        "server/services/long_calls.py",
        "            self._runtime.remove_damaged([blocks[number] for number in damaged], name)\n",
        "",
    ),
    Fault(
        "a wrong block gets to its tier with a store that was queued",
        "tiers/core/tier_jobs.py",
        "        if self._wrong and job.kind is JobKind.STORE:\n",
        "        if False:\n",
    ),
    Fault(
        "a reader may report wrong blocks",
        "server/services/long_calls.py",
        "        if Role.ENGINE not in CALLER.get().roles:\n",
        "        if False:\n",
    ),
    Fault(
        "a cancelled call frees slots that a thread reads",
        "server/rpc/own_copies.py",
        "        return asyncio.shield(task)\n",
        "        return task\n",
    ),
    Fault(
        "a store is small if its first part is",
        _DIGESTS,
        "return sum(block.part_bytes for block in blocks if self._has_digest(block))",
        "return sum(block.part_bytes for block in list(blocks)[:1])",
    ),
    Fault(
        "parts of streams have no digest",
        _BROKER,
        "recording = self.writers.record_digests(store) if store is not None else None",
        "recording = None",
    ),
    Fault(
        "tiers get damaged blocks",
        _DIGESTS,
        "            damaged.update(self._find_damaged(blocks, worker))\n",
        "",
    ),
    Fault(
        "damaged blocks that a tier did not get stay in memory",
        _DIGESTS,
        "            self._remove_damaged(damaged, worker.tier.name)\n",
        "            pass\n",
    ),
    Fault(
        "the outcomes of a store beside a damaged block are those of other blocks",
        _DIGESTS,
        "                if damaged:\n                    left = iter(outcomes)\n",
        "                if False:\n                    left = iter(outcomes)\n",
    ),
    Fault(
        "a block that is damaged while a tier reads it counts as stored",
        _DIGESTS,
        "                if late := self._find_damaged(done, worker):\n",
        "                if late := set[Block]():\n",
    ),
    Fault(
        "loaded parts have no digest",
        _DIGESTS,
        "                self._digests.record(done)\n",
        "                pass\n",
    ),
    Fault(
        "streams bring no digests",
        _STREAMS,
        "digests = pack_offsets([table[slot // DIGEST_PAGE_BYTES] for slot in stream.slots])",
        "digests = b''",
    ),
    Fault(
        "streams over gRPC bring no digests",
        _TRANSFER,
        "            yield transfer_pb2.PullResponse(digests=pack_offsets(self._digests.of(slots)))\n",
        "",
    ),
    Fault(
        "damaged blocks of another server are loaded",
        "server/peers/peer_tier.py",
        "                damaged.update(_damaged(blocks, rank, digests))\n",
        "",
    ),
    Fault(
        "a load under an expired lease is confirmed",
        _CACHE,
        "        if lease.expires_at <= self._runtime.now():\n"
        '            raise LeaseNotFound(f"lease {lease.id} has expired")\n',
        "",
    ),
    Fault(
        "a store is completed while streams write to it",
        _CACHE,
        "        await self._end_writers(store_id)\n",
        "",
    ),
    Fault(
        "a draining server begins requests",
        _CACHE,
        "        self._sessions.refuse_if_draining()\n"
        "        session = self._sessions.get(request.session)\n"
        "        if not request.request_id:",
        "        session = self._sessions.get(request.session)\n        if not request.request_id:",
    ),
    Fault(
        "a cancelled lookup keeps its lease",
        _CACHE,
        "        except asyncio.CancelledError:  # the client never gets the lease's id to release it\n"
        "            self._release(session, lease)\n",
        "        except asyncio.CancelledError:\n",
    ),
    Fault(
        "a long Push does not renew its store",
        _TRANSFER,
        "store = self._core.renew_store(session, store_id, expires_at)",
        "store = self._core.store(session, store_id)",
    ),
    Fault(
        "a Push over gRPC does not count its bytes",
        _TRANSFER,
        "        if not store.receive(offset, end):\n",
        "        if False:\n",
    ),
    Fault(
        "a Pull continues after its lease has ended",
        _TRANSFER,
        "                self._core.lease(session, lease_id)\n                nbytes",
        "                nbytes",
    ),
    Fault(
        "bytes of a Pull do not count for the rate limit",
        _TRANSFER,
        "                self._pulled.inc(nbytes)\n                if limiter is not None:\n",
        "                self._pulled.inc(nbytes)\n                if False:\n",
    ),
    Fault(
        "a Push may exceed its store",
        "protos/wire/part_sequence.py",
        "if position + nbytes > self.total_bytes:",
        "if position > self.total_bytes:",
    ),
    Fault(
        "a claim does not wait for the hold",
        "server/services/handoff.py",
        "            await self._wait_settled(session, name, request.min_blocks, self._validator.wait(request.wait))",
        "            pass",
    ),
    Fault(
        "a session of revoked credentials gets heartbeats",
        "server/services/session.py",
        "                if session.revoked:\n",
        "                if False:\n",
    ),
    Fault(
        "bytes copied to an ended store count as stored",
        _DEVICES,
        "        # Raises if the store has ended meanwhile, because then the copied bytes are lost.\n"
        "        self._core.renew_store(session, store_id, self._runtime.now() + self._validator.leases.default)\n",
        "",
    ),
    Fault(
        "a load under an ended lease is confirmed",
        _DEVICES,
        "        # Raises if the lease has ended meanwhile.\n        self._core.lease(session, lease.id)\n",
        "",
    ),
    Fault(
        "a client may set any deadline for copies",
        _DEVICES,
        "return min(request.deadline_nanoseconds or latest, latest)",
        "return request.deadline_nanoseconds or latest",
    ),
    Fault(
        "an unfinished eviction continues after its call",
        "server/services/admin.py",
        "            work.cancel()\n",
        "",
    ),
    Fault(
        "a check that ends early prevents further checks",
        "server/services/online_fsck.py",
        "        finally:\n            self._running = False\n",
        "        finally:\n",
    ),
    Fault(
        "a lease may be longer than the maximum",
        "server/rpc/request_checks.py",
        "return min(seconds or self.leases.default, self.leases.max)",
        "return seconds or self.leases.default",
    ),
    Fault(
        "keys of one length may be more than the maximum",
        "server/rpc/request_checks.py",
        "if has_length and nbytes <= limits.max_keys * key_bytes and not keys.lengths:",
        "if has_length and not keys.lengths:",
    ),
    Fault(
        "keys may have one length and a list of lengths",
        "server/rpc/request_checks.py",
        "if has_length and nbytes <= limits.max_keys * key_bytes and not keys.lengths:",
        "if has_length and nbytes <= limits.max_keys * key_bytes:",
    ),
    Fault(
        "groups of a short list of keys are not checked",
        "server/services/long_calls.py",
        "                validator.check_groups(keys, joined, key_bytes, session.namespace)\n",
        "                pass\n",
    ),
    Fault(
        "a lookup does not ask shared tiers",
        _CACHE,
        "if not (source or self._has_shared_tiers):",
        "if not source:",
    ),
    Fault(
        "a failed call over a socket counts as answered",
        _SOCKETS,
        "            code = refusal.code.name\n",
        '            code = "OK"\n',
    ),
    Fault(
        "a cancelled call over a socket counts as answered",
        _SOCKETS,
        'began, code = time.monotonic(), "CANCELLED"',
        'began, code = time.monotonic(), "OK"',
    ),
    Fault(
        "a caller over a socket keeps calling after a refusal",
        _SOCKETS,
        "return pack_error(number, status), refusal.hold_back",
        "return pack_error(number, status), 0.0",
    ),
    Fault(
        "calls above the rate limit are served",
        "server/rpc/call_rules.py",
        "                check_rate(session_id)\n",
        "                pass\n",
    ),
    Fault(
        "a refused call has the request id of an earlier call",
        _SOCKETS,
        "            rules.tracing.record_request_id(None)  # the calls of a connection share a context\n",
        "            pass\n",
    ),
    Fault(
        "texts beyond their bound are parsed",
        "protos/wire/request_bounds.py",
        "if field is not None and length > field.leaf_bytes:",
        "if field is not None and field.leaf_bytes < 0:",
    ),
    Fault(
        "the durations of calls in a bucket are not added to the larger buckets",
        "server/telemetry/metrics.py",
        "zip(_RPC_BOUNDS, accumulate(series.numbers), strict=True)",
        "zip(_RPC_BOUNDS, series.numbers, strict=True)",
    ),
    Fault(
        "a refused session counts for its tenant",
        _SESSIONS,
        "            if limiter is not None:\n                limiter.close_session()\n            raise\n",
        "            raise\n",
    ),
    Fault(
        "an ended session keeps its connections",
        _SESSIONS,
        "            session.limiter.close_session()\n        for disconnect in session.disconnects:\n",
        "            session.limiter.close_session()\n        for disconnect in ():\n",
    ),
    Fault(
        "a caller without shared memory may map the region",
        _SESSIONS,
        "return pool if caller.shared_memory and (pool or caller.tenant is None) else None",
        "return pool if pool or caller.tenant is None else None",
    ),
    Fault(
        "a caller of one tenant may map the common memory",
        _SESSIONS,
        "return pool if caller.shared_memory and (pool or caller.tenant is None) else None",
        "return pool if caller.shared_memory else None",
    ),
    Fault(
        "a client gets the common memory",
        "server/rpc/attach_socket.py",
        "self._region.pools[pool]",
        "self._region.pools[0]",
    ),
    Fault(
        "other memory pools are used after a restart",
        "server/memory_pools.py",
        "            digest.update(tenant.tag)\n",
        "            pass\n",
    ),
    Fault(
        "connections that wait for memory wait for ever",
        _IN_FLIGHT_LIMITS,
        "for each in self._waiting if nbytes else ():",
        "for each in ():",
    ),
    Fault(
        "a lost connection keeps its memory",
        _SOCKETS,
        "        self._release()\n        if not self.ended.done():",
        "        if not self.ended.done():",
    ),
    Fault(
        "the slots of a process that mapped the region are not freed",
        "server/rpc/attach_socket.py",
        "            if ended:\n                self._sessions.detach(hello.session_id, number)\n",
        "            pass\n",
    ),
    Fault(
        "a store without bytes is published",
        "server/rpc/sessions.py",
        "        core.unmapped_from = 0\n",
        "",
    ),
    Fault(
        "slots are reused while a stream reads them",
        "server/rpc/own_copies.py",
        "        lease.readers += 1\n",
        "        lease.readers += 0\n",
    ),
    Fault(
        "other users may attach",
        "server/rpc/attach_socket.py",
        "return _credentials_of(connection)[1] in (0, os.getuid())",
        "return True",
    ),
    Fault(
        "an ended copy stays a writer of its store",
        "server/rpc/own_copies.py",
        "            self._runtime.core.writer_gone(session_id, number)\n",
        "",
    ),
    Fault(
        "a Push writes to the slots of an ended store",
        _STREAMS,
        "                stream.check()\n                connection.receive(views)",
        "                connection.receive(views)",
    ),
    Fault(
        "a Push with a gap completes its store",
        _STREAMS,
        "return request.complete and parts.total_bytes > 0 and stream.store.has_all(parts.total_bytes)",
        "return request.complete",
    ),
    Fault(
        "ended connections count as open",
        _STREAMS,
        "                self._places.leave(accepted.place)\n",
        "                pass\n",
    ),
    Fault(
        "a load by streams under an expired lease is confirmed",
        _BROKER,
        "        if lease.expires_at <= self._runtime.now():\n"
        '            raise LeaseNotFound(f"lease {lease.id} has expired")\n',
        "",
    ),
    Fault(
        "a store is completed while another stream writes",
        _BROKER,
        "        if self.writers.busy(stream.target) or len(",
        "        if len(",
    ),
    Fault("streams do not count as calls", _BROKER, "            self._sessions.count_call(opened)\n", ""),
    Fault(
        "the end of a session ends streams of all sessions",
        _BROKER,
        "            if stream.ref.session_id == session_id:\n",
        "            if True:\n",
    ),
    Fault(
        "a refused stream keeps the thread of a slow client",
        _CLIENT,
        "                self.abort()",
        "                pass",
    ),
    Fault(
        "a slow stream is not ended",
        _CLIENT,
        "        return now > self._began_at + seconds",
        "        return False",
    ),
    Fault(
        "bytes of a stream are reported at its end only",
        _CLIENT,
        "self._unreported >= _REPORT_BYTES\n",
        "False\n",
    ),
    Fault(
        "a plan outside of the blocks ends the copy worker",
        _WORKER,
        "except (DeviceError, LayoutError, CopyCancelled, RegionError) as error:",
        "except (DeviceError, CopyCancelled, RegionError) as error:",
    ),
    Fault(
        "copies begin after their deadline",
        _WORKER,
        'return header["copy"] in engine.cancelled or time.monotonic_ns() >= header["deadline"]',
        'return header["copy"] in engine.cancelled',
    ),
    Fault("registrations outlive their copy worker", _WORKER_CLIENT, "        self._on_ended()\n", ""),
    Fault(
        "a copy worker that hangs is not killed",
        _WORKER_CLIENT,
        "            child.kill()\n        return await answer",
        "            raise Refused('DEVICE_LOST', 'no answer')\n        return await answer",
    ),
    Fault(
        "earlier registrations stay open",
        _REGISTRY,
        "            for one in earlier:\n                self._drop(one)\n            try:",
        "            try:",
    ),
    Fault(
        "slots are reused during a copy of a device",
        _REGISTRY,
        "        held.enter_context(access)\n",
        "",
    ),
    Fault(
        "a cancelled call does not cancel its copy",
        _REGISTRY,
        "            registration.worker.cancel(registration.id, number)\n",
        "",
    ),
    Fault(
        "releases are refused above the rate limit",
        "server/auth/rate_limits.py",
        "if not is_release or self._calls.overdraft(self._clock()) >= _MAX_OVERDRAFT:",
        "if True:",
    ),
    Fault(
        "a limiter with open sessions is dropped",
        "server/auth/rate_limits.py",
        "return not self.sessions and all(",
        "return all(",
    ),
    Fault(
        "an expired token is accepted",
        "server/auth/tokens.py",
        "return self.identity if self.expires is None or now < self.expires else None",
        "return self.identity",
    ),
    Fault(
        "a broken token file removes all tokens",
        "server/auth/authenticator.py",
        "return None if self._file is None else self._file.content",
        "return None if self._file is None or self._file._refusal else self._file.content",
    ),
    Fault(
        "each refusal is a line of the audit log",
        "server/telemetry/line_limit.py",
        "if used - now > self._ahead:",
        "if False:",
    ),
    Fault(
        "a default lease equal to the maximum is refused",
        "server/config/validation.py",
        'if values["leases.default"] > values["leases.max"]:',
        'if values["leases.default"] >= values["leases.max"]:',
    ),
    Fault(
        "a server without memory is healthy",
        "server/telemetry/grpc_health.py",
        "works = stats.tiers[0].available_bytes > 0",
        "works = True",
    ),
    Fault(
        "the status page shows tenants without a token",
        "server/telemetry/http.py",
        'elif path != "/healthz" and not self.server.admits(',
        'elif path == "/metrics" and not self.server.admits(',
    ),
    Fault(
        "a tier may return too few outcomes",
        "server/tier_host/guard.py",
        "if len(answers) == len(asked):",
        "if len(answers) <= len(asked):",
    ),
    Fault(
        "a block that a tier did not fill is served",
        "server/tier_host/guard.py",
        "                outcomes[number] = Outcome.CORRUPT\n",
        "",
    ),
    Fault(
        "loads wait for a stalled tier",
        "server/tier_host/worker.py",
        "            self._threads.abandon(WorkQueue.LOAD)\n",
        "            pass\n",
    ),
    Fault(
        "events of other namespaces are sent",
        "server/services/events.py",
        "None if request.all_namespaces else session.namespace.id,",
        "None,",
    ),
    Fault(
        "a stalled replay blocks the others",
        "server/events/log_reader.py",
        "    replay.abandon()\n    lock.close()\n",
        "    replay.abandon()\n",
    ),
    Fault(
        "a topic does not begin with the blocks that are held",
        "server/events/publisher.py",
        "            async for change in self._held.all(name[1], is_stored=is_wanted):\n                topic.change(change)\n",
        "",
    ),
    Fault(
        "a replay of messages has no end",
        "server/events/reader_connection.py",
        "            return self._peer.seal(END_FRAMES)\n",
        '            return b""\n',
    ),
    Fault(
        "only the holds of the first slice are missing",
        "server/services/handoff.py",
        "enumerate(renewed)",
        "enumerate(renewed[:_SLICE])",
    ),
    Fault(
        "a lookup that waited in vain keeps its lease",
        "server/services/cache.py",
        "            return lease\n        self._release(session, lease)\n        return None",
        "            return lease\n        return None",
    ),
    Fault(
        "a withdrawal of a lease tells no call",
        "server/services/long_calls.py",
        "        finally:\n            self._runtime.run_commands()\n\n    async def renew",
        "        finally:\n            pass\n\n    async def renew",
    ),
    Fault(
        "a withdrawal that overtakes its call has no effect",
        "server/services/cache.py",
        "                session.withdraw(grant_id)\n",
        "                pass\n",
    ),
    Fault(
        "releases of holds count as other calls",
        "server/services/handoff.py",
        "session, now = self._sessions.get(request.session, is_release=True), self._runtime.now()\n        for part",
        "session, now = self._sessions.get(request.session), self._runtime.now()\n        for part",
    ),
    Fault(
        "connections of ended sessions still count",
        "server/rpc/sessions.py",
        "            self._drop_connections(session.core.tenant, len(session.disconnects))\n",
        "            pass\n",
    ),
)
