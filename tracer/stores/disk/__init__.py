"""Reading and writing files fast, past the page cache or through mapped memory."""
