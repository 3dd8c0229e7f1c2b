"""What is a looped model? The contract, the paper's looped Transformer, Ouro, Huginn, looped decoders, checkpoints."""
