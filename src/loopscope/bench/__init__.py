"""How fast is it? Ratios of things measured side by side and interleaved, beside the machine's own matrix products."""
