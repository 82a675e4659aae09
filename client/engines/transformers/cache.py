"""KV cache for transformers: restores prefixes into a `DynamicCache` and stores computed blocks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import DynamicCache

from ... import Client, DurableStatus, Group, KVTierError, Namespace, make_key
from ..failures import Unsupported
from ..identity import InBackground, with_weights_version
from .generate_settings import reason_to_bypass
from .layout import CACHE_ARGUMENT, CacheLayout, UnsupportedModelError
from .length_regimes import LengthRegimes
from .model_identity import engine_attributes, model_attributes, run_obstacles, run_settings
from .model_state import StateTracker

__all__ = ["HASH_SCHEME", "Hit", "KVTierCache", "block_hashes"]

_log = logging.getLogger(__name__)

HASH_SCHEME = "kvtier.transformers.sha256.1"
"""Hash scheme in the namespace. It must change when the hashes change."""

_NOT_IDENTIFIED = "the digest of the weights is not known yet"
_SESSIONS = 4
"""Most sessions that one cache keeps open, for states of the model that alternate."""


@dataclass(frozen=True)
class Hit:
    """Result of `KVTierCache.restore`."""

    tokens: int = 0
    """Number of leading tokens whose KV was loaded."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Number of these tokens per tier that had them."""


class _Moment(NamedTuple):
    """What the KV depends on besides the tokens."""

    version: str
    """Version of the model's state."""
    settings: str
    """Settings of torch."""


@dataclass(frozen=True)
class _Session:
    """Client in the namespace of one moment, and what is known of the model at this moment."""

    moment: _Moment
    layout: CacheLayout
    regimes: LengthRegimes
    client: Client


class KVTierCache:
    """Loads and stores one model's KV cache in a kvtier server.

    One sequence at a time (batch size 1, no beams). Not thread-safe, like the model itself. If the
    server is absent, slow or incompatible, every lookup is a miss. Only invalid arguments raise.

    Restored KV is what this model would compute, except for rounding: kernels round differently for
    prompts of different lengths, as they also do without kvtier.

    At construction the cache runs the model on short prompts, also at positions on both sides of
    each limit in its configuration. If the KV of a prompt depends on the length of the sequence
    (dynamic or long RoPE), blocks are shared only among lengths that have equal KV.

    A thread computes the digest of the weights. Until it is known, every lookup is a miss, and
    nothing is stored. If it cannot be computed, for example because the weights change meanwhile,
    this process shares no blocks with others.

    Each call first looks for changes of the model. After a change the cache uses a new namespace,
    which is empty:

    - parameters, buffers and other tensors: replaced, moved, converted, or changed in place. A
      change that torch does not count (through `.data`, NumPy, another process, or a custom kernel)
      is noticed if it changes one of 16 elements that are read of each tensor, or any element of a
      tensor of up to 256. After sparse changes of this kind, call `model_changed`.
    - the modules of the model, their attributes, the configuration, adapters and their flags, the
      attention implementation, and methods or functions that are replaced in the model's code;
    - torch's autocast, default element type, and settings of kernels.

    If a state returns without a change of tensors, for example because an adapter is disabled
    again, its namespace returns, too.

    The cache neither loads nor stores, and logs one warning for each reason, while the model is in
    training mode, has forward hooks (except `observers`) or a replaced `forward`, has tensors that
    are not in memory (offloaded, meta) or were created in inference mode, has attributes whose
    content cannot be compared, while modes of torch are active, and for arguments of `generate` for
    which the tokens alone do not determine the KV.

    Not noticed: changes inside of functions (closures, globals, `__code__`) and of the code of
    other libraries, and changes between the computation of a cache of the caller and `save`.
    """

    def __init__(
        self,
        model: Any,
        endpoint: str | None = None,
        *,
        block_tokens: int = 64,
        name: str | None = None,
        revision: str | None = None,
        tenant: str = "",
        extra: bytes = b"",
        wait: float = 2.0,
        observers: Collection[Callable[..., Any]] = (),
        connect: Callable[[Namespace], Client] | None = None,
    ) -> None:
        """Runs the model on short prompts, and starts the thread that reads its weights.

        Two processes share blocks if `name`, `revision`, `block_tokens`, `tenant`, `extra`, the
        model's configuration and state, and the versions of torch and transformers are equal. If
        `name` or `revision` is None, a digest of all weights counts, too. `extra`: bytes that
        identify anything else that changes the KV. `wait`: seconds to wait for the server when a
        session begins, and for blocks of a lower tier in each lookup. `observers`: forward hooks
        that change nothing. `connect`: creates the client instead of `endpoint`, for example the
        method `client` of `kvtier.client.testing.FakeServer`.

        Raises `UnsupportedModelError` for a model whose cache is not full attention throughout.
        """
        self._model = model
        self._block_tokens = block_tokens
        self._extra = extra
        self._wait = wait
        self._connect = connect or (lambda namespace: Client(endpoint, namespace=namespace, name="transformers"))
        self._name, self._revision, self._tenant = name or type(model).__name__, revision or "", tenant
        self._failing = self._is_closed = False
        self._warned: set[str] = set()
        self._session: _Session | None = None
        self._sessions: dict[_Moment, _Session] = {}
        self._moment: _Moment | None = None
        self._origins: weakref.WeakKeyDictionary[DynamicCache, Any] = weakref.WeakKeyDictionary()
        self._regimes: tuple[int, LengthRegimes] | None = None
        self.last_hit = Hit()
        """Result of the latest `restore` or `generate`."""
        self.bypassed: Counter[str] = Counter()
        """Number of calls of `restore` and `generate` that did not ask the server, by reason."""
        self._tracker = StateTracker(model, observers)
        self._probe()
        is_trusted = name is not None and revision is not None
        self._attributes = self._identify(weights=not is_trusted)
        if is_trusted:
            self.wait_until_identified(wait)

    @property
    def client(self) -> Client | None:
        """The client of the namespace that was used last, or None if no call has used one."""
        return self._session.client if self._session is not None else None

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    def wait_until_identified(self, seconds: float) -> bool:
        """Waits until the digest of the weights is known. Returns whether calls use the server."""
        self._attributes.wait(seconds)
        return self._current(count=False) is not None

    def model_changed(self) -> None:
        """Takes a new namespace. Call it after changes of weights that are not noticed."""
        self._tracker.renew()

    def restore(self, input_ids: Any) -> tuple[DynamicCache, Hit]:
        """Returns a cache with the leading full blocks that the server has, and the hit.

        Pass the cache to the model as `cache` (`past_key_values` before transformers 5.24). After a
        miss the cache is empty. The cache never holds the last token, so that the model has a token
        to compute.
        `input_ids`: one sequence, as `[n]`, `[1, n]` or a list.
        """
        tokens = _sequence(input_ids)
        self.last_hit = Hit()
        session, cache = self._current(), DynamicCache()
        regime = self._known_regimes(session).of(len(tokens))
        self._origins[cache] = (self._moment, regime) if self._moment is not None else None
        if session is None:
            return cache, self.last_hit
        if regime is None:
            self.bypassed["the KV of sequences of this length is not shared"] += 1
            return cache, self.last_hit
        try:
            cache, self.last_hit = self._restore(session, self._keys(session.regimes, tokens[:-1], regime))
            self._failing = False
        except Exception as error:  # noqa: BLE001 - the engine must continue without the cache
            self._log_failure("the cache was not restored, so the prompt is computed", error)
        self._origins[cache] = session.moment, regime
        return cache, self.last_hit

    def save(self, input_ids: Any, cache: DynamicCache) -> int:
        """Stores the full blocks that `cache` holds and the server lacks. Returns their number.

        If `cache` and `input_ids` differ in length, the shorter length counts. The model must have
        computed `cache` in its present state. If the model has changed since `restore` returned the
        cache, or since the last call if the cache is another one, nothing is stored. Of a model
        whose KV depends on the length, only a cache of `restore` is stored.
        """
        tokens = _sequence(input_ids)
        before = self._moment
        session = self._current(after_run=True, count=False)
        if session is None:
            return 0
        try:
            tokens = tokens[: (length := cache.get_seq_length())]
            regime = session.regimes.of(len(tokens))
            unknown = (before, 0) if session.regimes.is_one else None
            origin = self._origins.get(cache, unknown)
            if regime is None or session.regimes.of(length) != regime or origin != (session.moment, regime):
                return 0
            return self._save(session, self._keys(session.regimes, tokens, regime), cache)
        except Exception as error:  # noqa: BLE001 - a failed save is only a later miss
            self._log_failure("blocks were not saved", error)
            return 0

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Restores the known prefix, calls `model.generate`, then stores prompt and output.

        Arguments and result are those of `model.generate`. kvtier is not used for batches, beams,
        padding, chunked prefill, assistants, inputs other than tokens, or `use_cache=False` (the
        default of MPT), and not if the caller passes a cache. The log has one warning for each of
        these reasons.
        """
        self.last_hit = Hit()
        reason = reason_to_bypass(input_ids, options, self._model.generation_config)
        if reason is not None:
            self.bypassed[reason] += 1
            self._warn_once(f"`generate` runs without the cache, because {reason}")
            return self._model.generate(input_ids, **options)
        cache, _ = self.restore(input_ids)
        wants_dict = options.pop("return_dict_in_generate", None)
        if wants_dict is None:
            settings = options.get("generation_config") or self._model.generation_config
            wants_dict = settings.return_dict_in_generate
        options.setdefault("attention_mask", torch.ones_like(input_ids))
        options[CACHE_ARGUMENT] = cache
        output = self._model.generate(input_ids, return_dict_in_generate=True, **options)
        if getattr(output, CACHE_ARGUMENT) is cache:
            self.save(output.sequences[0], cache)
        else:  # the model has computed all tokens again, because its frequencies have changed
            self._current(after_run=True, count=False)
        return output if wants_dict else output.sequences

    def flush(self, input_ids: Any, *, wait: float = 10.0) -> int:
        """Waits up to `wait` s until full blocks are durable. Returns how many are durable."""
        keys = self.keys(input_ids)
        try:
            return self.client.flush(keys, wait=wait).count(DurableStatus.DURABLE) if keys and self.client else 0
        except KVTierError as error:
            self._log_failure("blocks were not flushed", error)
            return 0

    def close(self) -> None:
        self._is_closed = True
        for session in self._sessions.values():
            _end(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def keys(self, input_ids: Any) -> list[bytes]:
        """Returns the keys of the full blocks of a sequence, in the namespace of `client`."""
        tokens = _sequence(input_ids)
        regimes = self._known_regimes(self._session)
        regime = regimes.of(len(tokens)) if self._session is not None else None
        return [] if regime is None else self._keys(regimes, tokens, regime)

    def _known_regimes(self, session: _Session | None) -> LengthRegimes:
        if session is not None:
            return session.regimes
        is_known = self._regimes is not None and self._regimes[0] == self._tracker.structure
        return self._regimes[1] if self._regimes and is_known else LengthRegimes(())

    def _keys(self, regimes: LengthRegimes, tokens: Sequence[int], regime: int) -> list[bytes]:
        hashes = block_hashes(tokens, self.block_tokens, extra=self._extra + regimes.tag(regime))
        return [make_key(block, 0) for block in hashes]

    def _restore(self, session: _Session, keys: Sequence[bytes]) -> tuple[DynamicCache, Hit]:
        if not keys:
            return DynamicCache(), Hit()
        lease = session.client.lookup(keys, wait=self._wait, prefix=True, slots=True)
        try:
            hits = lease.prefix_hits
            if hits == 0:
                return DynamicCache(), Hit()
            with session.client.read(lease, range(hits)) as batch:
                copies = session.layout.copy_in(batch.memory, batch.offsets)
        finally:
            lease.release()
        # The hit is certain only now, because the end of the read has checked the lease.
        blocks = Counter(lease.sources[:hits])
        tiers = {tier: count * self.block_tokens for tier, count in blocks.items()}
        return session.layout.cache_of(copies), Hit(hits * self.block_tokens, tiers)

    def _save(self, session: _Session, keys: Sequence[bytes], cache: DynamicCache) -> int:
        if not keys:
            return 0
        if not session.layout.matches(cache, len(keys) * self.block_tokens):
            raise ValueError("`cache` does not hold one sequence of this model")
        with session.client.write(keys) as batch:
            if batch.wanted:
                session.layout.copy_out(cache, batch.wanted, batch.memory, batch.offsets)
            return len(batch.wanted)

    def _current(self, *, after_run: bool = False, count: bool = True) -> _Session | None:
        """Returns the session for the model as it is now, or None if its KV cannot be identified.

        `after_run`: see `StateTracker.update`. `count`: whether the reason for None is counted.
        """
        self._moment, reason = None, "the state of the model is not known"
        try:
            self._tracker.update(after_run=after_run)
            if self._attributes.has_failed and not self._tracker.version:
                self._tracker.renew()
            if not (reason := self._obstacle()):
                moment = self._moment = _Moment(self._tracker.version, run_settings(self._model.device))
                self._session = self._sessions.get(moment) or self._open(moment)
                if self._session is not None:
                    return self._session
                reason = _NOT_IDENTIFIED
        except UnsupportedModelError as error:
            reason = str(error)
            self._warn_once(reason)
        except Exception as error:  # noqa: BLE001 - the engine must continue without the cache
            self._log_failure("the state of the model is not known, so the cache is not used", error)
        self.bypassed[reason] += count
        return None

    def _obstacle(self) -> str:
        """Returns why the KV cannot be identified now, or "". Warns once for each reason."""
        reasons = [*(["it is closed"] if self._is_closed else []), *self._tracker.snapshot.obstacles, *run_obstacles()]
        for reason in reasons:
            self._warn_once(f"the cache is not used, because {reason}")
        return reasons[0] if reasons else ""

    def _probe(self) -> tuple[CacheLayout, LengthRegimes]:
        layout = CacheLayout.probe(self._model, self._block_tokens)
        if self._obstacle():
            return layout, LengthRegimes(())
        if self._regimes is None or self._regimes[0] != self._tracker.structure:
            regimes = LengthRegimes.probe(self._model, self._tracker.learn)
            self._regimes = self._tracker.structure, regimes
        return layout, self._regimes[1]

    def _open(self, moment: _Moment) -> _Session | None:
        """Returns a new session, or None while the namespace of the moment is not known.

        A moment with a version of its own needs no digest, because no other process has it.
        """
        if (attributes := {} if moment.version else self._attributes.value) is None:
            return None
        layout, regimes = self._probe()
        namespace = Namespace(
            model=self._name,
            revision=self._revision,
            hash_scheme=HASH_SCHEME,
            world_size=1,
            tenant=self._tenant,
            dtype=str(layout.dtype).removeprefix("torch."),
            layout=layout.describe(),
            groups=(Group(name="full_attention", block_tokens=self.block_tokens, part_bytes=layout.part_bytes),),
            attributes={**attributes, **engine_attributes(layout.device), "torch": moment.settings},
        )
        client = self._connect(with_weights_version(namespace, moment.version))
        session = _Session(moment, layout, regimes, client)
        # If the client of another session is not connected, the server is absent.
        if all(other.client.connected for other in self._sessions.values()):
            with contextlib.suppress(KVTierError):  # the client has logged the error, and retries
                client.wait_until_connected(self._wait)
        self._sessions[moment] = session
        for ended in map(self._sessions.pop, [*self._sessions][:-_SESSIONS]):
            _end(ended)
        return session

    def _identify(self, *, weights: bool) -> InBackground[dict[str, str]]:
        """Starts to compute the attributes of the model as it is now, whose version is ""."""
        tracker = self._tracker
        snapshot, own = tracker.snapshot, tracker.own_paths

        def is_stopped() -> bool:
            return self._is_closed or not tracker.knows("")

        try:
            compute = model_attributes(snapshot, own, weights=weights, is_stopped=is_stopped)
        except Unsupported as error:
            unsupported = error

            def compute() -> dict[str, str]:
                raise unsupported

        message = "kvtier: this process shares no blocks, because its model has no identity: %s"
        return InBackground(compute, lambda error: None if is_stopped() else _log.warning(message, error))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning("kvtier: %s", message)

    def _log_failure(self, what: str, error: Exception) -> None:
        _log.log(logging.DEBUG if self._failing else logging.WARNING, "kvtier: %s: %s", what, error)
        self._failing = True


def _end(session: _Session) -> None:
    """Closes a session. Blocks of a unique version are evicted first, as no process uses them."""
    if session.moment.version and session.client.connected:
        with contextlib.suppress(KVTierError):
            session.client.reset(retire=True)
    session.client.close()


def _sequence(input_ids: Any) -> list[int]:
    """Returns one sequence as a list; raises ValueError for a batch."""
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and input_ids.shape[0] == 1:
            input_ids = input_ids[0]
        if input_ids.dim() != 1:
            raise ValueError(f"input_ids must be one sequence, [n] or [1, n], not {tuple(input_ids.shape)}")
        return [int(token) for token in input_ids.tolist()]
    return [int(token) for token in input_ids]


def block_hashes(tokens: Sequence[int], block_tokens: int, *, extra: bytes = b"") -> list[bytes]:
    """Returns the hash (32 bytes) of each full block of `tokens`."""
    data = np.asarray(tokens, dtype="<i8").tobytes()
    parent = hashlib.sha256(HASH_SCHEME.encode() + b"\0" + extra).digest()
    step = 8 * block_tokens
    hashes = []
    for end in range(step, len(data) + 1, step):
        parent = hashlib.sha256(parent + data[end - step : end]).digest()
        hashes.append(parent)
    return hashes
