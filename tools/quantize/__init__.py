"""`quire quantize`: a plain checkpoint as one of 4 or 8 bits, in compressed-tensors' format."""
