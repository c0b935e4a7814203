"""What an operator is told of each request: a line of the access log."""
