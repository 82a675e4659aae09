"""Mutation test of the test suites: which planted faults `make test` finds, and which it misses.

`__main__` plants each fault of the modules beside it in a copy of the source tree and runs tests
there. The decision core is not part of it: `simulation.mutants` plants faults there.
"""

from __future__ import annotations

from collections.abc import Mapping

from .adapter_faults import ADAPTER_FAULTS
from .client_faults import CLIENT_FAULTS
from .server_faults import SERVER_FAULTS
from .storage_faults import STORAGE_FAULTS

__all__ = ["FAULTS", "related_tests"]

FAULTS = (*ADAPTER_FAULTS, *CLIENT_FAULTS, *SERVER_FAULTS, *STORAGE_FAULTS)

_ADAPTERS = "tests/client/engines/vllm_adapters/test_vllm_"
_DAMAGE = "tests/server/test_damaged_memory.py"
_WRONG = "tests/server/test_wrong_blocks.py"
_WARM = "tests/server/test_warm_restart.py"
_POOLS = "tests/server/test_memory_pools.py"


def _adapter_tests(*names: str) -> tuple[str, ...]:
    return tuple(f"{_ADAPTERS}{name}.py" for name in names)


_RELATED: Mapping[str, tuple[str, ...]] = {
    "client/": (
        "tests/client/transport",
        "tests/client/session",
        "tests/client/test_client.py",
        "tests/client/test_cancel.py",
    ),
    "client/engines/sglang/": ("tests/client/engines/sglang_adapter",),
    "client/engines/transformers/": (
        "tests/client/engines/test_transformers.py",
        "tests/client/engines/test_transformers_identity.py",
        "tests/client/engines/test_transformers_lengths.py",
        "tests/client/engines/test_transformers_parts.py",
        "tests/client/engines/test_transformers_purity.py",
    ),
    "client/engines/vllm/": _adapter_tests(
        "groups", "namespaces", "hooks", "parts", "worker", "settings", "sleep", "stats", "lora", "peers", "ranks"
    ),
    "client/engines/vllm/scheduler/": _adapter_tests(
        "parts", "reset", "saves", "holds", "settings", "policy", "stats", "events", "block_pool", "connector", "steps"
    ),
    "client/engines/vllm/worker/": _adapter_tests(
        "worker", "parts", "saves", "sleep", "stats", "copies", "device", "device_route", "audit"
    ),
    "client/engines/vllm_tier/": _adapter_tests("tier_parts", "tier_copies", "tier_hooks", "tier_requests"),
    "client/events/": ("tests/client/events", f"{_ADAPTERS}server_events.py"),
    "client/handoff/": ("tests/client/handoff",),
    "client/offload/": ("tests/client/offload",),
    "client/operations/": ("tests/client/test_operation_effects.py", "tests/client/test_client.py"),
    "client/part_streams.py": ("tests/client/test_part_streams.py",),
    "client/transport/": ("tests/client/transport", "tests/client/session", "tests/client/test_cancel.py"),
    "cuda/device/": ("tests/cuda/device",),
    "cuda/host/": ("tests/cuda/host",),
    "protos/": ("tests/protos", "tests/server/bad_input"),
    "server/auth/": ("tests/server/auth",),
    "server/bulk/": ("tests/server/bulk", "tests/server/auth/test_roles.py", _DAMAGE),
    "server/config/": ("tests/server/config",),
    "server/devices/": ("tests/server/devices", "tests/cuda/device"),
    "server/events/": ("tests/server/events", "tests/server/services/test_events.py"),
    "server/memory_pools.py": (_POOLS,),
    "server/peers/": ("tests/server/peers",),
    "server/region_digests.py": ("tests/server/test_region_digests.py", _DAMAGE),
    "server/rpc/": ("tests/server/rpc", "tests/server/bad_input", "tests/server/auth"),
    "server/rpc/attach_socket.py": (
        "tests/server/rpc/test_listening_sockets.py",
        "tests/server/test_dead_clients.py",
        _WARM,
        _POOLS,
    ),
    "server/rpc/own_copies.py": ("tests/server/bulk", "tests/server/rpc/test_own_copies.py"),
    "server/rpc/sessions.py": ("tests/server/rpc", "tests/server/bad_input", "tests/server/auth", _POOLS),
    "server/services/": ("tests/server/services", "tests/server/bad_input", "tests/client/test_client.py", _DAMAGE),
    "server/services/long_calls.py": (_WRONG, "tests/server/services", "tests/client/test_client.py", _DAMAGE),
    "server/services/devices.py": ("tests/cuda/device",),
    "server/telemetry/": ("tests/server/telemetry",),
    "server/tier_host/": ("tests/server/tier_host",),
    "server/warm_restart.py": (_WARM,),
    "tiers/core/tier_jobs.py": ("tests/tiers/core/test_bad_tiers.py", _WRONG),
    "tiers/disk/": ("tests/tiers/disk",),
    "tiers/eviction/": ("tests/tiers/eviction",),
    "tiers/lmdb/": ("tests/tiers/lmdb",),
    "tiers/stats/": ("tests/tiers/stats", "tests/tiers/core/test_misses.py", "tests/tiers/core/test_requests.py"),
    "tiers/storage/": ("tests/tiers/storage", "tests/tiers/lmdb", "tests/tiers/disk"),
}


def related_tests(file: str) -> tuple[str, ...]:
    """Returns the tests to run first for a fault in a file: those of the longest prefix."""
    return _RELATED[max((prefix for prefix in _RELATED if file.startswith(prefix)), key=len)]
