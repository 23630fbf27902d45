"""A page with a server: it follows a run, computes requested metrics, and loads more detail where the user zooms."""
