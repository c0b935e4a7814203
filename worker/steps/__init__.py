"""Request rows, and the inputs of a step that are gathered from them."""
