"""What the POST endpoints do, and what they have in common."""
