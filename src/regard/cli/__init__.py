"""The command `regard`. A command is a file here; what it needs is imported when it runs, so help comes at once."""
