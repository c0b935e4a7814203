"""What is made of hidden states for requests with pooling params: pools, a head, and what is sent of them."""
