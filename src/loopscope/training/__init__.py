"""How is a model trained? Settings and presets, objectives, an estimate, the training loop, and the kinds of runs."""
