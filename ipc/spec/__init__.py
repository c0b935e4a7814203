"""What an engine is made of: its configuration, and what a model computes."""
