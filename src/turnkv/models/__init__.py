"""Model files: finds, fetches and converts them into a folder that transformers loads; it never runs a model."""
