"""What a developer or operator runs: check, bench, stress, the pocket model's trainer."""
