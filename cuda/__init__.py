"""Shared memory and copies: the host region, shared device memory, batched copies between them.

This package knows nothing of tiers, gRPC or the wire contract. It imports neither numpy nor torch;
cuda-bindings are imported only when a `CudaDriver` is made.

- `host`: the shared region, its NUMA placement and pinning, copies on the host, socket I/O.
- `device`: the driver contract (`driver`), CUDA's driver (`cuda_driver`), what an engine exports
  (`exports`), layouts and copy plans, opened handles, the copies themselves (`copies`).
- `testing`: a driver for machines without a GPU.
"""
