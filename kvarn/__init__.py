"""KVarN: a KV cache a quarter to a fifth of the usual size, that keeps what it has read."""

__version__ = "0.1.0"
