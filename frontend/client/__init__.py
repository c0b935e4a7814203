"""A frontend's tie to an engine: clients, the engines that they start, threads and loops that share one."""
