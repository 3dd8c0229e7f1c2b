"""Does a model keep its contract? Does it run correctly here: precision, batches, caches, exits and speed?"""
