"""How do saved loops become saved time? Adaptive depth with a batch that is kept full."""
