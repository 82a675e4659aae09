"""How the effects of operations are performed: gRPC and sockets, synchronous and asyncio."""
