"""Pictures and pages for reviewers: the preview of a case and the report of an output folder."""
