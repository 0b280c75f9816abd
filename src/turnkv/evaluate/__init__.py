"""Measurements and reports over an engine: replays of recorded sessions and what they cost; it never changes how the engine works."""
