"""kvtier: a tiered home for the KV cache of LLM inference engines."""

__all__ = ["__version__"]

__version__ = "0.1.0"
