"""Benchmark of connectors in a real vLLM on the CPU: conversations, idle steps, dead stores.

    make bench-engine JSON=FILE
    build/vllm/bin/python -m bench.engine [--json FILE] [--quick] [--only PART …]

A run takes 580 to 700 s on two quiet cores, estimated from quick runs. Each of 12 engines takes 28
s to start and end (60 s beside other load). The conversations take 30 s without a connector and 10
s with one. Idle steps take 45 s in each of two engines, and up to 60 s more if the result is
unclear. The first tokens beside a dead shared store take 2 minutes.
"""
