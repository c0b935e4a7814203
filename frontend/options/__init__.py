"""EngineArgs: what an engine is started with."""
