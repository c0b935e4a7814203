"""`quire top`: what is looked at, what the keys do, how a frame is drawn. Loads rich."""
