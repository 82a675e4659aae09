"""`make stress`: a real server and eight client processes under load; both sides are killed at random; a verdict ends the run.

- `chaos`: draws from the seed what happens when.
- `orchestrator`: carries it out, with `client_pool` (client processes), `site` (the server) and `audit`.
- `audit`: after a kill, checks that every block that was acknowledged as durable can still be loaded.
- `final_checks`: after the last client, checks that all slots and leases are free and the tiers are sound.
- `worker`: a client process. It draws `acts`, verifies each byte that it loads and writes its findings to files,
  because it can be killed at any moment.
"""
