"""What follows a failure: who is to blame, and what is tried next."""
