"""How do many runs become one study? Jobs on this machine, and the demo."""
