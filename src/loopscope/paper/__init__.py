"""What did the paper publish, and what are our counterparts? Its numbers, tables, figures and claims."""
