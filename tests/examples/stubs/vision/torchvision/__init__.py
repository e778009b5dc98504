"""As much of torchvision as Opacus's examples use, on tensors: it has no build for every machine."""
