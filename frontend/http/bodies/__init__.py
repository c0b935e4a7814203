"""Bodies of requests and answers: their types, how they are read, and the document that describes them."""
