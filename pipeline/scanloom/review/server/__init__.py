"""The review server: pages in a browser on which people look at results, decide and correct."""
