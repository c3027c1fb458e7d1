"""`python -m saltflat.demo`: the main jobs on data that come with scikit-learn."""
