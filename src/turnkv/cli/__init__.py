"""The command line: reads arguments and prints; it computes and decides nothing."""

from turnkv.cli.app import main

__all__ = ["main"]
