"""Worker half of the vLLM connector."""
