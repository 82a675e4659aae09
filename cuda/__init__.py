"""Memory that both sides see: the shared host region, devices' memory across processes, and batched copies between them.

Knows nothing of tiers, gRPC or the wire contract, and imports neither numpy nor torch; cuda-bindings only where a `CudaDriver` is
made. The host: `region`, `host_memory`, `cgroup`, `pinning`, `copy`, `malloc`. Devices: `driver` (the contract), `cuda_driver` and
`host_driver` (who keep it), `exports` and `origin` (what an engine says of its memory), `layout` and `plans` (where a block's bytes
lie), `handles`, `ordering` and `device_copies` (how the server moves them).
"""
