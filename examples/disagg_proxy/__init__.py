"""Proxy for prefill/decode disaggregation in which decode engines also hand turns back to P.

`turns`, `transfer`, `conversations`, `events` and `fleet` decide without sockets and clocks;
`engines`, `exchange`, `watch`, `app` and `program` do the I/O. The proxy imports nothing of kvtier
and uses vLLM's field names, so a copy of this folder runs anywhere.
"""
