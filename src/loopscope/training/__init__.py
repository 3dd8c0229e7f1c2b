"""How is a model trained? Settings and presets, objectives, an estimate, the loop, and the runs that go round in it."""
