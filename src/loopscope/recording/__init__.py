"""How does a checkpoint become a recording? On the examples of its task, the tokens of a text, or a benchmark."""
