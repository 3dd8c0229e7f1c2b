"""What do recordings say? Forced exits, difficulty, bootstrap intervals and the diagnosis; never the network."""
