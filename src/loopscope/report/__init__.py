"""What does a reader see? The products that are made of results: tables, figures, the page."""
