"""What a connector costs and gains in a real vLLM on the CPU: a multi-turn workload, and steps in which it has nothing to do.

make bench-engine JSON=FILE        or        build/vllm/bin/python -m bench.engine [--json FILE] [--quick] [--only PART …]

The time is an estimate from quick runs: each of 12 engines takes 28 s to start and to end (60 s where others compute as well),
the conversations 30 s without a connector and 10 s with one, idle steps 45 s in each of two engines and up to 60 s more while they
decide nothing: 580 to 700 s on two quiet cores.
"""
