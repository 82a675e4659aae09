"""Benchmark of connectors in a real vLLM on the CPU: conversations, and idle steps.

    make bench-engine JSON=FILE
    build/vllm/bin/python -m bench.engine [--json FILE] [--quick] [--only PART …]

Takes 580 to 700 s on two quiet cores, estimated from quick runs: 28 s to start and end each of 12
engines (60 s beside other load); 30 s for the conversations without a connector and 10 s with one;
idle steps take 45 s in each of two engines, and up to 60 s more while they decide nothing.
"""
