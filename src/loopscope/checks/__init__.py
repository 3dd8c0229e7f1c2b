"""Does a model keep its contract? And on this machine: precision, batches, caches, exits and speed."""
