"""`quire stress --hostile`: one key's attacks beside another key's streams, and what those notice of it."""
