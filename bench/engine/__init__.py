"""What a connector costs and gains in a real vLLM on the CPU: a multi-turn workload, and steps in which it has nothing to do.

make bench-engine JSON=FILE        or        build/vllm/bin/python -m bench.engine [--json FILE] [--quick] [--only PART …]
"""
