"""`make stress`: a real server and eight client processes under load, with kills on both sides, and a verdict.

`chaos` says from the seed what happens when; `orchestrator` does it, with `crew` (the clients), `site` (the server), `audit` (is
what was acknowledged as durable still there after a kill) and `finale` (what is left after the last client). A client is
a `worker` that draws `acts`; it verifies each byte that it loads and leaves what it saw in files, for it may be killed at any
moment. `watch` samples memory, `flatness` judges it, `verdict` judges everything.

The seed drives every choice, but not time: the same seed gives the same blows and the same clients, not the same run.
"""
