"""Is anything lost where a writer is killed, the disk is full, or two write at once? `python -m tests.kills`."""
