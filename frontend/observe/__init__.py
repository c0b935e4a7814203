"""Series of metrics and files of traces."""
