"""What is a looped model? The contract, the paper's looped Transformer, Ouro, Huginn, decoders that are looped, and
checkpoints.
"""
