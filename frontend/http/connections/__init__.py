"""HTTP connections: who may have one, what may be sent on it, and what of it is read and kept."""
