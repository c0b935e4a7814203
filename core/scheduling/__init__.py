"""What is to run next: requests, the step that is formed of them, and what it is limited by."""
