"""Speed, error and memory of saltflat's exact curvature against the alternatives."""
