"""How do other libraries run looped models? By LoopScope's models inside transformers, vLLM and lm_eval."""
