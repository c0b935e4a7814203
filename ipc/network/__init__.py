"""What clients on other machines need beside the protocol: addresses, keys, files that must be equal."""
