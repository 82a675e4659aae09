"""Proxy for prefill/decode disaggregation. Decode engines also hand turns back to prefill engines.

P is a prefill engine, D a decode engine. `turns`, `transfer`, `conversations`, `agents`, `events`
and `fleet` contain the decisions, without sockets and clocks. `engines`, `exchange`, `hints`,
`watch`, `app` and `program` do the I/O. Only `hints` imports kvtier, if the command line names
servers for hints, so this folder also runs on its own.
"(B2.20)" and similar cite docs/behaviour.md of kvtier.
"""
