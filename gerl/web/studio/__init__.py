"""The studio: a page on which runs are started, queued, compared and exported (`gerl studio`)."""
