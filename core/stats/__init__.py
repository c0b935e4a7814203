"""What the core counts, and what it says of itself."""
