"""How do saved loops become saved time? Requests exit early, and the engine refills the batch."""
