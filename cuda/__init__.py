"""Memory that both sides see: the shared host region, and batched copies from and into it.

Knows nothing of tiers, gRPC or the wire contract, and imports neither numpy nor torch.
"""
