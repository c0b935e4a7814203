"""`quire stress`: load and deaths together, and whether every request still got the tokens it was owed."""
