"""How do many runs become one study? A file, its plan, steps addressed by what made them, on one machine or on many."""
