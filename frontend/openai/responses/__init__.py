"""/v1/responses beside its endpoints: items in, items and events out, and what is kept of both."""
