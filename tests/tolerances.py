"""All tolerances of the tests of kernels, in one place: largest absolute difference from float64, by dtype.

They hold for values of about unit size: keys, values and queries drawn from the unit normal distribution.
"""

import torch

ATTEND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""An attention body, offsets up to some hundreds included; of quantised keys and values, against what they mean."""

ROTATE = {torch.float64: 1e-11, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""A rotation by up to 1000 positions: the angle alone is rounded to 1000 * 2**-24 in float32."""

LOGITS = 1e-4
"""A tiny model's logits (spread about 1.2) in float32, against Hugging Face's or the masked oracle's."""

PRODUCT = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
"""A product of unit inputs with weights whose rows have about unit length."""
