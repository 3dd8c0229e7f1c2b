"""When to exit? Every signal once: as a step from loop to loop, for replay and for live runs."""
