"""Does a model do what it promises? Its contract, and on this machine precision, batches, caches, exits and speed."""
