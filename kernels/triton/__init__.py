"""What every Triton kernel shares: launches, their sizes, and what can go wrong with a device."""
