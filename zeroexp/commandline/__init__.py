"""What the command line understands: words before Hydra reads them, and mistakes told in one line."""
