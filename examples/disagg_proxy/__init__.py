"""Proxy for prefill/decode disaggregation. Decode engines also hand turns back to prefill engines.

P is a prefill engine, D a decode engine. `turns`, `transfer`, `conversations`, `events` and `fleet`
contain the decisions, without sockets and clocks. `engines`, `exchange`, `watch`, `app` and
`program` do the I/O. The proxy does not import kvtier, so this folder also runs on its own.
"(B2.20)" and similar cite docs/behaviour.md of kvtier.
"""
