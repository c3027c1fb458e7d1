"""Exact and estimated curvature of a risk, block by block."""
