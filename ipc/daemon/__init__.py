"""The directory that a daemon runs in, and what shows others that it does."""
