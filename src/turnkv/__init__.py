"""turnkv: a turn-aware KV cache for long agent conversations."""
