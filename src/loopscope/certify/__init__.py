"""How does a threshold come with a guarantee? Losses, bounds, calibration, and a monitor of what comes later."""
