"""KV as tensors: the part of kv/ that needs torch. Conversions between caches and entries, and the kernels that do them on GPUs."""
