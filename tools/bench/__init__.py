"""`quire bench`: workloads, peers and measured floors."""
