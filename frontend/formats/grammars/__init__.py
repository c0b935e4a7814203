"""What a turn may be -> the grammar that enforces it, in llguidance's Lark, which is not loaded here."""
