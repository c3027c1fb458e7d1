"""Training toward flat minima: regularizers and optimizers."""
