"""LoopScope."""
