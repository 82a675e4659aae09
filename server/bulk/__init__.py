"""The bulk process: a child of the server that serves Push and Pull, so that calls do not wait behind bytes.

It maps the region and moves bytes, and decides nothing. For each stream it asks the server's own process, over a socket pair, which
slots a store or a lease has, and says what it has moved and when it has ended.

| file | runs in | does |
|---|---|---|
| `messages` | both | what the two say to each other |
| `desk` | the server | answers for stores and leases; knows who may still be writing |
| `supervisor` | the server | starts the child, again if it dies |
| `process` | the child | listens, and ends with the server |
| `control` | the child | asks the server |
| `streams` | the child | Push and Pull |
"""
