"""The engine: the pure core, the turns of its loop, and the process or caller that drives them."""
