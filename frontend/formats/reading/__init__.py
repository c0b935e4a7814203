"""Text as a model writes it -> events: readers of markers, calls and arguments. No grammar, no API."""
