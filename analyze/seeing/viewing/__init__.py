"""A page with a server behind it: it follows a run, computes what is asked, and looks closer where it is zoomed."""
