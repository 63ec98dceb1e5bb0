"""Arguments of the command line are checked before Hydra reads them, and a mistake is one line."""
