"""`make stress` and `make torture`: a server and eight clients under load, killed at random.

Both end with a verdict. `make stress` runs for a time and kills, stops and ends all processes.
`make torture` kills only the server, so often, at short intervals and also while it starts.

- `plan`: what a run does; the rounds of a torture run.
- `chaos`: draws the faults and their times from the seed.
- `orchestrator`: runs them, with `client_pool` (client processes), `server_runs` (the server) and
  `audit`.
- `durable_ledger`: the journal. A client records a block before it stores it, and again when the
  server has acknowledged it as durable.
- `audit`: after each start, compares the server with the journal. `inventory`: what the server says
  that its tiers hold. A block counts as lost if the tier that holds all blocks does not list it, or
  if it cannot be loaded from there. This tier has room for all blocks that clients can store, so
  it never needs to evict one: an eviction fails the run, and excuses no loss. The other tier is too
  small and evicts all the time; audits do not read it.
- `final_checks`: after the last client, checks that all slots and leases are free and the tiers are
  sound.
- `worker`: a client process. It draws `actions`, verifies each byte that it loads and writes its
  findings to files, because it can be killed at any moment.
"""
