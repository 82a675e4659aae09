"""Bulk process: a child of the server that serves Push and Pull, apart from all other calls.

It maps the region and copies bytes, but makes no decision. For each stream it asks the server over
a socket pair for the slots of a store or a lease, and reports progress and the end of the stream.

| file | runs in | does |
|---|---|---|
| `messages` | both | messages between server and child |
| `broker` | the server | grants slots to streams; knows which streams may still write |
| `supervisor` | the server | starts and restarts the child |
| `main` | the child | entry point: listens, ends with the server |
| `client` | the child | asks the broker |
| `grpc_streams`, `tcp_streams` | the child | Push and Pull |
"""
