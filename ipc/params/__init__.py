"""What a request may ask for: its parameters, each field declared and checked once."""
