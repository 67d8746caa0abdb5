"""Decisions of reviewers on results: their log, and how readers share the cases."""
