"""What went wrong, where and since when: checks, reports, pictures."""
