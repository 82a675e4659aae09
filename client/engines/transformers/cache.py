"""KV cache for transformers: restores prefixes into a `DynamicCache` and stores computed blocks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import DynamicCache

from ... import Client, DurableStatus, Group, KVTierError, Namespace, make_key
from ..identity import with_weights_version
from .cache_layout import CACHE_ARGUMENT, CacheLayout, UnsupportedModelError
from .generate_settings import reason_to_bypass
from .length_regimes import LengthRegimes
from .model_identity import engine_attributes, run_obstacles, run_settings, state_digest, weights_digest
from .model_state import StateTracker

__all__ = ["HASH_SCHEME", "Hit", "KVTierCache", "block_hashes"]

_log = logging.getLogger(__name__)

HASH_SCHEME = "kvtier.transformers.sha256.1"
"""Hash scheme in the namespace. It must change when the hashes change."""

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
    are not in memory (offloaded, meta) or were created in inference mode, while modes of torch are
    active, and for arguments of `generate` for which the tokens alone do not determine the KV.

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
        """Runs the model on short prompts, and reads its weights.

        Two processes share blocks if `name`, `revision`, `block_tokens`, `tenant`, `extra`, the
        model's configuration and state, and the versions of torch and transformers are equal. If
        `name` or `revision` is None, a digest of all weights replaces `revision`. `extra`: bytes
        that identify anything else that changes the KV. `wait`: seconds to wait for the server at
        start, and for blocks of a lower tier in each lookup. `observers`: forward hooks that change
        nothing. `connect`: function that creates the client instead of `endpoint`, for example the
        method `client` of `kvtier.client.testing.FakeServer`.

        Raises `UnsupportedModelError` for a model whose cache is not full attention throughout.
        """
        self._model = model
        self._block_tokens = block_tokens
        self._extra = extra
        self._wait = wait
        self._connect = connect or (lambda namespace: Client(endpoint, namespace=namespace, name="transformers"))
        self._failing = False
        self._warned: set[str] = set()
        self._sessions: dict[_Moment, _Session] = {}
        self._origins: weakref.WeakKeyDictionary[DynamicCache, tuple[_Moment, int]] = weakref.WeakKeyDictionary()
        self._regimes: tuple[int, LengthRegimes] | None = None
        self.last_hit = Hit()
        """Result of the latest `restore` or `generate`."""
        self._tracker = StateTracker(model, observers)
        probed = self._probe()
        self._identity = self._identify(name, revision, tenant)
        self._state = state_digest(self._tracker.snapshot, self._tracker.own_paths)
        self._session = self._open(self._moment(), probed)

    @property
    def client(self) -> Client:
        """The client of the namespace that was used last."""
        return self._session.client

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

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
        session = self._current()
        cache = DynamicCache()
        if session is None or (regime := session.regimes.of(len(tokens))) is None:
            return cache, self.last_hit
        try:
            cache, self.last_hit = self._restore(session, self._keys(session, tokens[:-1], regime))
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
        before = self._session.moment
        session = self._current(after_run=True)
        if session is None:
            return 0
        try:
            tokens = tokens[: cache.get_seq_length()]
            regime = session.regimes.of(len(tokens))
            unknown = (before, 0) if len(session.regimes.ranges) == 1 else None
            if regime is None or self._origins.get(cache, unknown) != (session.moment, regime):
                return 0
            return self._save(session, self._keys(session, tokens, regime), cache)
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
            self._current(after_run=True)
        return output if wants_dict else output.sequences

    def flush(self, input_ids: Any, *, wait: float = 10.0) -> int:
        """Waits up to `wait` s until full blocks are durable. Returns how many are durable."""
        keys = self.keys(input_ids)
        try:
            return self.client.flush(keys, wait=wait).count(DurableStatus.DURABLE) if keys else 0
        except KVTierError as error:
            self._log_failure("blocks were not flushed", error)
            return 0

    def close(self) -> None:
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
        regime = self._session.regimes.of(len(tokens))
        return [] if regime is None else self._keys(self._session, tokens, regime)

    def _keys(self, session: _Session, tokens: Sequence[int], regime: int) -> list[bytes]:
        hashes = block_hashes(tokens, self.block_tokens, extra=self._extra + session.regimes.tag(regime))
        return [make_key(block, 0) for block in hashes]

    def _restore(self, session: _Session, keys: Sequence[bytes]) -> tuple[DynamicCache, Hit]:
        if not keys:
            return DynamicCache(), Hit()
        lease = session.client.lookup(keys, wait=self._wait, prefix=True)
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

    def _current(self, *, after_run: bool = False) -> _Session | None:
        """Returns the session for the model as it is now, or None if its KV cannot be identified.

        `after_run`: see `StateTracker.update`.
        """
        try:
            self._tracker.update(after_run=after_run)
            if self._has_obstacles():
                return None
            moment = self._moment()
            session = self._sessions.get(moment)
            if session is None or not session.regimes.ranges:  # not probed yet
                session = self._open(moment, self._probe())
            self._session = session
        except UnsupportedModelError as error:
            self._warn_once(str(error))
            return None
        except Exception as error:  # noqa: BLE001 - the engine must continue without the cache
            self._log_failure("the state of the model is not known, so the cache is not used", error)
            return None
        return self._session

    def _has_obstacles(self) -> bool:
        """Whether the KV cannot be identified now. Warns once for each reason."""
        reasons = [*self._tracker.snapshot.obstacles, *run_obstacles()]
        for reason in reasons:
            self._warn_once(f"the cache is not used, because {reason}")
        return bool(reasons)

    def _moment(self) -> _Moment:
        return _Moment(self._tracker.version, run_settings(self._model.device))

    def _probe(self) -> tuple[CacheLayout, LengthRegimes]:
        """Runs the model on one token, and after a change of settings on short prompts."""
        layout = CacheLayout.probe(self._model, self._block_tokens)
        if self._has_obstacles():
            return layout, LengthRegimes(())
        if self._regimes is None or self._regimes[0] != self._tracker.structure:
            regimes = LengthRegimes.probe(self._model, self._tracker.learn)
            self._regimes = self._tracker.structure, regimes
        return layout, self._regimes[1]

    def _open(self, moment: _Moment, probed: tuple[CacheLayout, LengthRegimes]) -> _Session:
        layout, regimes = probed
        namespace = self._identity(
            dtype=str(layout.dtype).removeprefix("torch."),
            layout=layout.describe(),
            groups=(Group(name="full_attention", block_tokens=self.block_tokens, part_bytes=layout.part_bytes),),
            attributes={**engine_attributes(layout.device), "state": self._state, "settings": moment.settings},
        )
        client = self._connect(with_weights_version(namespace, moment.version))
        session = _Session(moment, layout, regimes, client)
        if not self._sessions or self.client.connected:  # else the server is absent
            with contextlib.suppress(KVTierError):  # the client has logged the error, and retries
                client.wait_until_connected(self._wait)
        old = self._sessions.pop(moment, None)
        self._sessions[moment] = self._session = session
        for ended in [old, *map(self._sessions.pop, [*self._sessions][:-_SESSIONS])]:
            if ended is not None:
                _end(ended)
        return session

    def _identify(self, name: str | None, revision: str | None, tenant: str) -> Callable[..., Namespace]:
        """Returns a function that makes namespaces of this model."""
        snapshot, own = self._tracker.snapshot, self._tracker.own_paths
        trusted = name is not None and revision is not None
        return partial(
            Namespace,
            model=name or type(self._model).__name__,
            revision=(revision or "") if trusted else weights_digest(snapshot, own),
            hash_scheme=HASH_SCHEME,
            world_size=1,
            tenant=tenant,
        )

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
