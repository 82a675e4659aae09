"""Shared memory and copies: the host region, shared device memory, batched copies between them.

This package imports nothing from tiers, gRPC or the wire contract, and neither numpy nor torch.
cuda-bindings are imported only when a `CudaDriver` is made.

- `host`: the shared region, its NUMA placement and pinning, copies on the host, socket I/O.
- `device`: the driver contract (`driver`), the driver of NVIDIA GPUs (`cuda_driver`), an engine's
  exported memory (`exports`), layouts and copy plans, opened handles, and copies (`copies`).
- `testing`: a driver for machines without a GPU.
"""
