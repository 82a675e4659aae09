"""Bulk process: a child of the server that serves only the streams Push and Pull.

The child maps the region and copies bytes, but decides nothing. For each stream it asks the server
over a socket pair for the slots of a store or a lease. It reports progress and the stream's end.

| file | runs in | does |
|---|---|---|
| `messages` | both | messages between server and child |
| `broker` | the server | grants slots to streams and tracks which streams may still write |
| `supervisor` | the server | starts and restarts the child |
| `broker_client` | the child | sends requests to the broker |
| `streams` | the child | entry point; Push and Pull over the socket protocol |
"""
