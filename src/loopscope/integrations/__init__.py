"""How do other libraries run looped models? Ours inside transformers, vLLM and lm_eval, as thin as it can be."""
