"""Measurements and reports over an engine: replays and what they cost; it never changes how the engine works."""
