"""The engine runs Hugging Face models over views: sessions, matching, scheduling and sampling; it never decides what to drop."""
