"""Host memory: the shared region, pinning, NUMA placement and copies."""
