"""Model files: finds, fetches and converts them into a folder that transformers loads; it never runs a model.

`turnkv.models.loading` reads such a folder into memory; it is not imported here, so that finding one needs no torch.
"""

from turnkv.models.resolve import ModelFolder, resolve_model
from turnkv.models.store import Progress

__all__ = ["ModelFolder", "Progress", "resolve_model"]
