"""Router that sends a request to the engine whose kvtier server has most of the prompt's blocks.

`block_index` and `routing` contain the decisions, without sockets and clocks. `subscription`, `app`
and `program` do the I/O. HTTP to engines and replies to clients are those of `disagg_proxy`. The
router does not import kvtier.
"""
