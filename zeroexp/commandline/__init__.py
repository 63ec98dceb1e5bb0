"""The command line checks its words before Hydra reads them, and tells of a mistake in one line."""
