"""The measures of the papers, one a file."""
