"""`quire run-batch`: files of requests and of their answers."""
