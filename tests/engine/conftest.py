import torch

# Tiny models: a second thread costs more than it brings.
torch.set_num_threads(1)
