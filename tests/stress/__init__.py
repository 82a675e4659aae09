"""`make stress`: a server and eight clients under load, killed at random; ends with a verdict.

- `chaos`: draws the faults and their times from the seed.
- `orchestrator`: runs them, with `client_pool` (client processes), `server_runs` (the server) and
  `audit`.
- `audit`: after a kill, checks that every block that was acknowledged as durable can still be
  loaded.
- `final_checks`: after the last client, checks that all slots and leases are free and the tiers are
  sound.
- `worker`: a client process. It draws `actions`, verifies each byte that it loads and writes its
  findings to files, because it can be killed at any moment.
"""
